/* Codecs of tests, written as a user's own: the printed ones must fail, all_bits must agree with NONE. */
#ifndef CONTROL_CODECS_H
#define CONTROL_CODECS_H

#include "../hpml.h"

#include <string.h>

/* The residual as Seide et al. 2014 print it, e <- g - decoded, without the e that was carried in. */
static inline hpml_status printed_encode(const hpml_codec *real, const hpml_packing *p, void *packed, float *e,
                                         const float *g, int64_t rows, const hpml_encode_info *info)
{
    hpml_status status = HPML_OK;
    for (int64_t r = 0; r < rows; r++, g += p->cols) {
        char       *q    = (char *)packed + (size_t)r * p->row_size;
        float      *lost = e ? e + r * p->cols : NULL;
        hpml_status row  = real->encode(p, q, lost, g, 1, info);
        if (row != HPML_OK) status = row;
        if (row != HPML_OK || !lost) continue;
        real->decode(p, lost, q, 1, false);
        for (int64_t i = 0; i < p->cols; i++) lost[i] = g[i] - lost[i];
    }
    return status;
}

static inline hpml_status printed_onebit_encode(const hpml_packing *p, void *packed, float *e, const float *g,
                                                int64_t rows, const hpml_encode_info *info)
{
    return printed_encode(hpml_codec_get(HPML_CODEC_ONEBIT), p, packed, e, g, rows, info);
}

static inline hpml_status printed_bf16_encode(const hpml_packing *p, void *packed, float *e, const float *g,
                                              int64_t rows, const hpml_encode_info *info)
{
    return printed_encode(hpml_codec_get(HPML_CODEC_BF16), p, packed, e, g, rows, info);
}

/* ONEBIT or BF16, with the printed residual. */
static inline hpml_codec printed_residual(hpml_codec_kind kind)
{
    hpml_codec own = *hpml_codec_get(kind);
    own.name       = "printed residual";
    own.encode     = kind == HPML_CODEC_BF16 ? printed_bf16_encode : printed_onebit_encode;
    return own;
}

static inline size_t all_bits_size(const hpml_codec_desc *desc, int64_t cols)
{
    (void)desc;
    return (size_t)cols * sizeof(float);
}

static inline hpml_status all_bits_encode(const hpml_packing *p, void *packed, float *e, const float *g, int64_t rows,
                                          const hpml_encode_info *info)
{
    (void)e, (void)info;
    memcpy(packed, g, (size_t)rows * p->row_size);
    return HPML_OK;
}

static inline void all_bits_decode(const hpml_packing *p, float *out, const void *packed, int64_t rows, bool add)
{
    const float *x = (const float *)packed;
    for (int64_t i = 0; i < rows * p->cols; i++) out[i] = add ? out[i] + x[i] : x[i];
}

/* Keeps all 32 bits, but travels by stripes as lossy codecs do: sums are those of HPML_CENTRAL, bit for bit. */
static const hpml_codec all_bits = { "all bits", false, false, false, false, all_bits_size, all_bits_encode,
                                     all_bits_decode };

#endif

/* Fuzz targets, one for each reader. */
#include <stddef.h>
#include <stdint.h>

enum { FUZZ_IDX, FUZZ_GZIP, FUZZ_CIFAR, FUZZ_CSV, FUZZ_TEXT, FUZZ_NPY, FUZZ_RECORDS, FUZZ_SAFETENSORS, FUZZ_CHECKPOINT,
       FUZZ_PARAMS, FUZZ_NPZ, FUZZ_TAR, FUZZ_TARGETS };
extern const char *const fuzz_names[FUZZ_TARGETS];

/* Gives an input to a target's reader and uses what comes of it. Aborts where a promise is broken; sanitizers see the
   rest. */
void fuzz_one(int target, const uint8_t *bytes, size_t size);

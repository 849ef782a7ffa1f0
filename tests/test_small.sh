#!/bin/sh
# Programs that predict from a model file, built with HPML_NO_TRAINING, stay small and predict; the reader of model
# files in Python (examples/hpml_model.py), against hpml where torch is installed.
tmp=$(mktemp -d) passed=0 failed=0 skipped=0
trap 'rm -rf "$tmp"' EXIT
check() { # NAME TEXT: passes without a text
    if [ -z "$2" ]; then passed=$((passed + 1)); else failed=$((failed + 1)); echo "FAIL $1: $2"; fi
}
cat >"$tmp/predict.c" <<'C'
#define HPML_IMPLEMENTATION
#include "hpml.h"
#include <stdio.h>
int main(int argc, char **argv)
{
    int32_t     x[5] = { 1, 2, 3, 4, 5 };
    float       y[55], sum = 0;
    hpml_ctx   *ctx = hpml_ctx_create(NULL);
    hpml_model *m   = argc > 1 ? hpml_model_load(ctx, argv[1], 1) : NULL;
    if (hpml_model_predict(m, x, 1, y) != HPML_OK) return puts(hpml_ctx_error(ctx)), 1;
    for (int i = 0; i < 55; i++) sum += y[i];
    hpml_ctx_free(ctx);
    return sum < 10.99f || sum > 11.01f; /* 11 rows of probabilities */
}
C
# C code needs no unwind tables, and programs of an embedder are not loaded at random addresses.
small='-std=c99 -Os -DHPML_STATIC -DHPML_NO_THREADS -DHPML_NO_SIMD -DHPML_NO_TRAINING -ffunction-sections
    -fdata-sections -fno-asynchronous-unwind-tables -fno-pie -no-pie -Wl,--gc-sections'
no_images=-DHPML_NO_CONVOLUTION no_sequences=-DHPML_NO_SEQUENCES
# The limits are for gcc 12 on x86-64, because other compilers make programs of other sizes.
judged=
case $(${CC:-cc} -dumpfullversion 2>/dev/null)-$(${CC:-cc} -dumpmachine) in 12.*-x86_64-*) judged=yes ;; esac
# size NAME MOST OPTIONS: a program that predicts has at most MOST bytes of text and data.
size() {
    name=$1 most=$2; shift 2
    if ! ${CC:-cc} $small -w -I. "$@" "$tmp/predict.c" -o "$tmp/predict" -lm 2>"$tmp/err"; then
        check "a small program, $name" "$(head -n 3 "$tmp/err")"
        return
    fi
    size=$(command size "$tmp/predict" | awk 'NR == 2 { print $1 + $2 }')
    echo "a program that predicts from a model file, $name: $size bytes of text and data"
    check "a small program, $name" "$([ "$size" -le $most ] || [ -z "$judged" ] ||
        echo "$size bytes, expected at most $most")"
}
size "with all ops" 93000
check "a small program predicts" "$("$tmp/predict" tests/model_v1.safetensors || echo "exit status $?")"
size "without convolution" 81920 $no_images # 80 KB
check "a small program without convolution predicts" "$(
    "$tmp/predict" tests/model_v1.safetensors || echo "exit status $?")"
size "without convolution and sequences" 70000 $no_images $no_sequences
check "a small program without sequences refuses a model with embeddings" "$(
    "$tmp/predict" tests/model_v1.safetensors >"$tmp/out"
    grep -q "model_v1.*: op embedding is not in this build: HPML_NO_SEQUENCES" "$tmp/out" || cat "$tmp/out")"
${CC:-cc} -std=c99 -DHPML_IMPLEMENTATION -O1 -w -I. tests/small.c -o "$tmp/save" -lm -lpthread && "$tmp/save" "$tmp"
# predicts SUFFIX OPTIONS: what a program without training predicts, and what it refuses
predicts() {
    suffix=$1; shift
    ${CC:-cc} -std=c99 -w -I. -DHPML_NO_TRAINING "$@" tests/small.c -o "$tmp/check" -lm -lpthread &&
        "$tmp/check" "$tmp" "$suffix" >"$tmp/out" || echo "exit status $?" >>"$tmp/out"
    check "HPML_NO_TRAINING $* predicts what the whole library does" "$(cat "$tmp/out")"
}
predicts fast -O1
predicts all -Os -DHPML_NO_SIMD -DHPML_NO_THREADS
predicts text -Os -DHPML_NO_SIMD -DHPML_NO_THREADS $no_images
predicts images -Os -DHPML_NO_SIMD -DHPML_NO_THREADS $no_sequences
for same in '2.all 2.text' '0.all 0.images' '1.all 1.images'; do
    check "ops that are left out change no bit: $same" "$(cd "$tmp" && cmp $same 2>&1)"
done
printf '#define HPML_IMPLEMENTATION\n#include "hpml.h"\nint main(void) { return 0; }\n' >"$tmp/body.c"
cp "$tmp/body.c" "$tmp/body.cc"
for compiler in gcc clang g++; do
    case $compiler in *++) source=body.cc dialect=-std=c++17 ;; *) source=body.c dialect=-std=c99 ;; esac
    if ! command -v $compiler >/dev/null; then
        skipped=$((skipped + 3))
        echo "skip 3 checks (no $compiler)"
        continue
    fi
    for options in $no_images $no_sequences \
        "$no_images $no_sequences -DHPML_NO_TRAINING -DHPML_NO_SIMD -DHPML_NO_THREADS -DHPML_STATIC"; do
        check "$compiler $options, without a warning" "$($compiler $dialect -Wall -Wextra -Wconversion -Wshadow \
            -fsyntax-only -I. $options "$tmp/$source" 2>&1 | head -n 5)"
    done
done
if ! command -v python3 >/dev/null; then
    skipped=$((skipped + 2))
    echo "skip 2 checks (no python3)"
else
    python3 examples/hpml_model.py tests/model_v1.safetensors >"$tmp/out" 2>&1
    check "the Python reader" "$(grep -q '^872 parameters in 9 tensors' "$tmp/out" || tail -n 2 "$tmp/out")"
    if python3 -c 'import torch' 2>/dev/null; then
        build/25_model_file "$tmp/house" >"$tmp/trained"
        cat >"$tmp/run.py" <<'PY'
import sys, torch
sys.path.insert(0, "examples")
from hpml_model import Model, to_torch
print("%.0f" % to_torch(Model(sys.argv[1]))(torch.tensor([[120, 35, 2.5]])).item())
PY
        want=$(sed -n 's/.* km: \([0-9]*\) .*/\1/p' "$tmp/trained")
        got=$(python3 "$tmp/run.py" "$tmp/house" 2>&1 | tail -n 1)
        check "PyTorch computes what hpml does" "$([ "$want" = "$got" ] || echo "$got, expected $want")"
    else
        skipped=$((skipped + 1))
        echo "skip 1 checks (no torch)"
    fi
    rm -rf examples/__pycache__
fi
echo "$passed passed, $failed failed, $skipped skipped"
[ $failed -eq 0 ]

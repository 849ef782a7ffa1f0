#!/bin/sh
# The headers under every dialect, compiler and option, without a warning; two units link; only hpml_* is visible.
mpicc=${MPICC:-mpicc} tmp=$(mktemp -d) passed=0 failed=0 skipped=0
trap 'rm -rf "$tmp"' EXIT
ok() { passed=$((passed + 1)); }
# skip N REASON: N checks are left out.
skip() { skipped=$((skipped + $1)); echo "skip $1 checks ($2)"; }
bad() { failed=$((failed + 1)); echo "FAIL $1"; head -n 5 "$tmp/err"; }
strict='-Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wstrict-prototypes -Werror'
cat >"$tmp/body.c" <<'C'
#include <stdio.h>
#define HPML_IMPLEMENTATION
#include "hpml.h"
int body(void);
int body(void) { return hpml_version() + hpml_ctx_threads(NULL); }
C
cat >"$tmp/user.c" <<'C'
#include "hpml.h"
int body(void);
int main(void)
{
    hpml_ctx *c    = hpml_ctx_create(NULL);
    int       good = hpml_ctx_status(c) == HPML_OK;
    hpml_ctx_free(c);
    return good && body() ? 0 : 1;
}
C
sed 's/"hpml.h"/"hpml_comm.h"/' "$tmp/body.c" >"$tmp/comm.c" # with many workers
# split builds: this header's body alone
printf '#define HPML_COMM_IMPLEMENTATION\n#include "hpml_comm.h"\n' >"$tmp/half.c"
cp "$tmp/body.c" "$tmp/body.cc"; cp "$tmp/comm.c" "$tmp/comm.cc"; cp "$tmp/comm.c" "$tmp/body.cu"
sed 's/int body(void)/extern "C" int body(void)/' "$tmp/user.c" >"$tmp/user.cc"
try() { if "$@" >"$tmp/err" 2>&1; then ok; else bad "$*"; fi; }
for cc in gcc clang; do
    command -v $cc >/dev/null || { skip 4 "no $cc"; continue; }
    for std in ${HPML_TEST_ALL:+c99 c11} c17; do try $cc -std=$std -O0 -fsyntax-only $strict -I. "$tmp/comm.c"; done
    [ $cc = gcc ] || [ -n "$HPML_TEST_ALL" ] || continue
    try $cc -std=c99 -O0 -fsyntax-only $strict -I. "$tmp/body.c"
    try $cc -std=c99 -O0 $strict -I. -c "$tmp/comm.c" -o "$tmp/$cc.o"
    try $cc -std=c99 -O2 $strict -I. "$tmp/user.c" "$tmp/$cc.o" -o "$tmp/two" -lm -lpthread
    [ -x "$tmp/two" ] && try "$tmp/two"
done
for object in build/hpml.o build/comm.o; do # ninja has compiled them with optimization and all warnings
    cat $object.warnings >"$tmp/err" 2>&1
    if [ -s "$tmp/err" ]; then bad "warnings in $object"; else ok; fi
done
for cxx in g++ clang++; do
    command -v $cxx >/dev/null || { skip 2 "no $cxx"; continue; }
    for unit in ${HPML_TEST_ALL:+body} comm; do
        try $cxx -std=c++17 -O0 -fsyntax-only ${strict%% -Wstrict*} -Werror -I. "$tmp/$unit.cc"
    done
    [ -f "$tmp/gcc.o" ] &&
        try $cxx -std=c++17 -Wall -Wextra -Werror -I. "$tmp/user.cc" "$tmp/gcc.o" -o "$tmp/mixed" -lm -lpthread
done
gcc -Ofast -fsyntax-only -I. "$tmp/body.c" >"$tmp/err" 2>&1
if grep -q 'without -ffast-math' "$tmp/err"; then ok; else bad "gcc -Ofast is refused"; fi # it would not see a NaN
gcc -U__BYTE_ORDER__ -D__BYTE_ORDER__=__ORDER_BIG_ENDIAN__ -w -fsyntax-only -I. "$tmp/body.c" >"$tmp/err" 2>&1
if grep -q 'big-endian machines are not supported' "$tmp/err"; then ok; else bad "big-endian machines are refused"; fi
for option in HPML_NO_THREADS HPML_NO_SIMD HPML_NO_TRAINING 'HPML_NO_TRAINING -DHPML_NO_SIMD' \
    'HPML_NO_CONVOLUTION -DHPML_NO_SEQUENCES' \
    ${HPML_TEST_ALL:+HPML_STATIC HPML_DEBUG HPML_NATIVE_ONLY}; do
    try gcc -std=c99 -fsyntax-only $strict -D$option -I. "$tmp/comm.c"
done
# dead COMPILER FILE OPTIONS: each private function of FILE has a caller. In a copy of the headers, static functions are
# without the attribute `unused`, which they have because some options leave a function without a caller. A kernel may
# lack callers for some instruction sets, but not for scalar, avx2 and avx512, so with fewer than 3 warnings it is in
# use. gcc reports unused functions only where it makes assembly code. The last function of FILE must be reported.
dead() {
    cc=$1 file=$2; shift 2
    echo 'static void planted(void) {}' >>"$tmp/copy/$file"
    $cc "$@" -O0 -Wunused-function -S -o /dev/null "$tmp/copy/$file" 2>"$tmp/err" || { bad "$file compiles"; return; }
    sed -nE 's/.*(\bhpml[a-z0-9_]+|planted).* defined but not used.*/\1/p' "$tmp/err" |
        sed -E 's/_(scalar|avx2|avx512|neon)$/ kernel/' | sort | uniq -c |
        awk '$3 == "" || $1 > 2 { print $2 }' >"$tmp/dead"
    cp "$tmp/dead" "$tmp/err"
    if [ "$(cat "$tmp/dead")" = planted ]; then ok; else bad "$file: functions that nothing calls"; fi
}
mkdir -p "$tmp/copy/tests"
cp -r tests/emulator tests/own_kernel.h "$tmp/copy/tests"
for header in hpml.h hpml_comm.h hpml_cuda.cuh; do
    sed -E 's/static __attribute__\(\(unused\)\)/static/
        s/static inline __attribute__\(\(always_inline, unused\)\)/static/' $header >"$tmp/copy/$header"
done
printf '#define HPML_IMPLEMENTATION\n#include "hpml.h"\n' >"$tmp/copy/serial.c"
printf '#define HPML_COMM_IMPLEMENTATION\n#include "hpml_comm.h"\n' >"$tmp/copy/many.c"
[ -z "$HPML_TEST_ALL" ] || dead gcc serial.c
if [ -z "$HPML_TEST_ALL" ]; then :
elif command -v "$mpicc" >/dev/null; then dead "$mpicc" many.c -DHPML_USE_MPI; else skip 1 "no $mpicc"; fi
[ -z "$HPML_TEST_ALL" ] || dead g++ tests/emulator/cuda_on_cpu.cc -std=c++17
# gcc warns of some unused things only when it makes code
if [ -n "$HPML_TEST_ALL" ]; then
    try gcc -std=c99 -O0 $strict -DHPML_IMPLEMENTATION -DHPML_NO_SIMD -x c -c hpml.h -o "$tmp/scalar.o"
    try gcc -std=gnu11 -O0 -DHPML_IMPLEMENTATION -DHPML_NO_THREADS -DHPML_NO_SIMD tests/test_trainer.c -o "$tmp/alone" \
        -lm
    try "$tmp/alone" --filter resume # without threads, vectors and -lpthread
fi
try gcc -std=c99 -fsyntax-only $strict -I. "$tmp/half.c" # what ninja links is such a build
for example in examples/*.c; do # the bodies are the same for all
    case $example in *01_* | *02_*) apart= ;; *) apart='-DHPMLI_BODY_INCLUDED -DHPML_COMM_BODY' ;; esac
    try gcc -fsyntax-only -Wall -Wextra -Werror $apart $example
done
if command -v "$mpicc" >/dev/null; then try "$mpicc" -std=c99 -fsyntax-only $strict -DHPML_USE_MPI -I. "$tmp/comm.c"
else skip 1 "no $mpicc"; fi
if [ -z "$HPML_TEST_ALL" ]; then :
elif printf '#include <cblas.h>\nint main(void) { return 0; }\n' | gcc -x c - -o /dev/null -lopenblas 2>/dev/null; then
    try gcc -std=gnu11 -O0 -DHPML_IMPLEMENTATION -DHPML_NO_SIMD -DHPML_USE_CBLAS tests/test_ops.c -o "$tmp/blas" \
        -lm -lpthread -lopenblas
    try "$tmp/blas" --filter gradients
else skip 2 'no OpenBLAS'; fi
extra=$(nm -g --defined-only "$tmp/gcc.o" 2>/dev/null | awk '{ print $3 }' | grep -vE '^(hpml_|body$)')
if [ -z "$extra" ]; then ok; else echo "$extra" >"$tmp/err"; bad "visible names that are not hpml_*"; fi
if [ -z "$HPML_TEST_ALL" ]; then : # test_cuda.sh has nvcc compile hpml.h with hpml_cuda.cuh
elif command -v nvcc >/dev/null; then
    try nvcc -std=c++17 -Xcompiler -Wall,-Wextra,-Wshadow,-fsyntax-only -I. -c "$tmp/body.cu" -o "$tmp/cu.o"
else skip 1 'no nvcc'; fi
# The README's lines for pkg-config, CMake and Meson.
awk '/^prefix=/ { on = 1 } /^```$/ { on = 0 } on' README.md >"$tmp/hpml.pc"
if command -v pkg-config >/dev/null; then
    PKG_CONFIG_PATH=$tmp pkg-config --cflags --libs hpml >"$tmp/err" 2>&1
    if grep -q '^-I/.*hpml.o -lm -lpthread' "$tmp/err"; then ok; else bad "the README's hpml.pc"; fi
else skip 1 'no pkg-config'; fi
block() { awk -v fence="\`\`\`$1" '$0 == fence { on = 1; next } /^```$/ { on = 0 } on' README.md | sed 's/-O2/-O0/'; }
mkdir "$tmp/project"
cp hpml.h "$tmp/project"
printf '#include "hpml.h"\nint main(void) { return hpml_version() != HPML_VERSION; }\n' >"$tmp/project/main.c"
if [ -z "$HPML_TEST_ALL" ]; then :
elif command -v cmake >/dev/null; then
    { printf 'cmake_minimum_required(VERSION 3.13)\nproject(my_program C)\nadd_executable(my_program main.c)\n'
        block cmake; } >"$tmp/project/CMakeLists.txt"
    try cmake -S "$tmp/project" -B "$tmp/project/cmake"
    try cmake --build "$tmp/project/cmake"
    try "$tmp/project/cmake/my_program"
else skip 3 'no cmake'; fi
if [ -z "$HPML_TEST_ALL" ]; then :
elif command -v meson >/dev/null; then
    { echo "project('my_program', 'c')"; block meson; } >"$tmp/project/meson.build"
    try meson setup "$tmp/project/meson" "$tmp/project"
    try ninja -C "$tmp/project/meson"
    try "$tmp/project/meson/my_program"
else skip 3 'no meson'; fi
echo "$passed passed, $failed failed, $skipped skipped"
[ $failed -eq 0 ]

#!/bin/sh
# What the headers promise about themselves: index, section, function and line lengths, budget, ASCII, macros; their
# examples and the README's run, as far as they are C. No line of examples, tests and build.ninja is longer than theirs.
tmp=$(mktemp -d) passed=0 failed=0
trap 'rm -rf "$tmp"' EXIT
check() {
    if [ -z "$2" ]; then passed=$((passed + 1))
    else failed=$((failed + 1)); echo "FAIL $1:"; echo "$2" | head -n 10; fi
}
wide() { awk 'length > 120 { print FILENAME ":" FNR ": " length }' "$@"; }
run() { # says what goes wrong when the program in $1 is compiled and run; kernels are not what is tested here
    ${CC:-cc} -O0 -DHPML_NO_SIMD -I. "$1" -o "$tmp/program" -lm -lpthread 2>&1 || { echo "does not compile"; return; }
    "$tmp/program" >"$tmp/out" 2>&1 || { echo "exit status $?"; cat "$tmp/out"; }
}
header() { # FILE LINES
    grep '^// >>' "$1" | sed 's|^// >>||' >"$tmp/tags"
    sed -n '/^\/\/ INDEX/,/^#ifndef/p' "$1" | grep '^//     ' | sed 's|^//     ||' >"$tmp/index"
    check "$1: the index is not the list of sections" "$(diff "$tmp/index" "$tmp/tags")"
    check "$1: sections of more than 400 lines" \
        "$(awk '/^\/\/ >>/ { if (NR - at > 400 && tag) print tag, NR - at; at = NR; tag = $2 }' "$1")"
    check "$1: functions of more than 60 lines" "$(awk '/^{/ { start = NR }
        /^}/ { if (start && NR - start > 62) print FILENAME ":" start ": " NR - start; start = 0 }' "$1")"
    check "$1: lines of more than 120 columns" "$(wide "$1")"
    check "$1: more than $2 lines" "$(awk -v most="$2" 'END { if (NR > most) print NR }' "$1")"
    check "$1: characters outside ASCII" "$(LC_ALL=C grep -n '[^ -~	]' "$1")"
    sed -n '/^\/\/ QUICK EXAMPLE/,/DOES NOT/p' "$1" | grep '^//     ' | sed 's|^//     ||' >"$tmp/example.c"
    [ "$1" = hpml_cuda.cuh ] && return # which test_cuda.sh compiles with nvcc
    check "$1: its example" "$(run "$tmp/example.c")"
    printf '#define HPML_IMPLEMENTATION\n#include "%s"\n' "$1" >"$tmp/body.c"
    check "$1: macros of other names that its body leaves behind" "$(${CC:-cc} -E -dD -I. "$tmp/body.c" | awk '
        /^# [0-9]/ { ours = $3 ~ /hpml/ } ours && /^#define/ { sub(/\(.*/, "", $2); left[$2] }
        /^#undef/ { delete left[$2] } END { for (name in left) if (name !~ /^(HPML|hpml)/) print name }')"
}
header hpml.h 14000
header hpml_comm.h 7000
header hpml_cuda.cuh 6000
check "lines of more than 120 columns" "$(wide $(find build.ninja examples tests -type f))"
goals=$(sed -n 's/^default//p' build.ninja)
for f in examples/[0-9]*.c* examples/ladder_*.cu; do
    for goal in $goals; do awk -v "goal=$goal:" '$2 == goal, !/\$$/' build.ninja; done |
        grep -qw "build/$(basename "${f%.*}")" || echo "$f"
done >"$tmp/unbuilt"
check "examples that plain ninja does not build" "$(cat "$tmp/unbuilt")"
names=$(grep -nE '^#define|__global__ .*\(' hpml_cuda.cuh | grep -vE 'hpmlg_k_|#define (HPMLG_|hpmlg_|HPML_CUDA_)')
check "hpml_cuda.cuh: kernels that are not hpmlg_k_*, macros that are not HPMLG_*" "$names"
awk '/^```c$/ { on = 1; n++; next } /^```$/ { on = 0 } on { print > ("'"$tmp"'/readme" n ".c") }' README.md
for f in "$tmp"/readme*.c; do check "a code block of the README" "$(run "$f")"; done
serial=$(grep -l '"hpml.h"' "$tmp"/readme*.c | head -n 1)
many=$(grep -l 'hpml_launch(' "$tmp"/readme*.c | head -n 1)
diff "$serial" "$many" >"$tmp/lines"
check "README: its serial program and that for many workers do not differ in 1 to 5 lines" "$(awk '
    /^</ { old++ } /^>/ { new++ }
    END { n = old > new ? old : new; if (n < 1 || n > 5) print n " lines" }' "$tmp/lines")"
check "README: its serial program" "$(run "$serial")"
cp "$tmp/out" "$tmp/alone"
check "README: three ranks learn what one learns" "$(HPML_RUN=threads:3 run "$many"
    sort "$tmp/out" "$tmp/alone" | sed 's/.*, //' | uniq -c | awk '$1 != 4 { print "three ranks and one: " $0 }')"
check "README: one of two processes without MPI trains by itself" "$(HPML_RUN= PMI_SIZE=2 PMI_RANK=0 run "$many" |
    grep -q 'mpicc -DHPML_USE_MPI' || echo "this error is missing: built without MPI")"
echo "$passed passed, $failed failed, 0 skipped"
[ $failed -eq 0 ]

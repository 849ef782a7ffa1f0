#!/bin/sh
# The headers on Windows: MinGW's gcc compiles both bodies without a warning; under wine an example with threads as
# ranks, the main job for an epoch and the trainer's tests run, and a save replaces a file. Skipped (77) without
# x86_64-w64-mingw32-gcc; without wine the programs are compiled but do not run.
tmp=$(mktemp -d) passed=0 failed=0
trap 'rm -rf "$tmp"' EXIT
mingw=x86_64-w64-mingw32-gcc
command -v $mingw >/dev/null || { echo "skipped: no $mingw"; exit 77; }
check() { # NAME COMMAND...
    name=$1; shift
    "$@" >"$tmp/out" 2>&1 </dev/null
    code=$?
    if [ $code -eq 0 ]; then passed=$((passed + 1)); echo "ok $name"
    else failed=$((failed + 1)); echo "FAIL $name: exit status $code"; tail -n 10 "$tmp/out"; fi
}
# -Wno-float-conversion: MinGW's own isnan converts double to float in a branch that does not run
strict='-O1 -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wno-float-conversion -Wstrict-prototypes -Werror'
apart='-O1 -DHPMLI_BODY_INCLUDED -DHPML_COMM_BODY -DHPML_CUDA_BODY'
check "hpml.h compiles" $mingw -std=gnu99 $strict -DHPML_IMPLEMENTATION -c -x c hpml.h -o "$tmp/hpml.o"
check "hpml_comm.h compiles" $mingw -std=gnu99 $strict -DHPML_COMM_IMPLEMENTATION -c -x c hpml_comm.h -o "$tmp/comm.o"
program() { # NAME FILE
    check "$1 compiles" $mingw $apart -static $2 "$tmp/hpml.o" "$tmp/comm.o" -o "$tmp/$1.exe" -lpthread
}
program 05_allreduce examples/05_allreduce.c
program 02_mnist examples/02_mnist.c
program test_trainer tests/test_trainer.c
if ! command -v wine >/dev/null; then
    echo "skip 3 checks (no wine)"
    echo "$passed passed, $failed failed, 3 skipped"
    [ $failed -eq 0 ]; exit
fi
export WINEPREFIX="$tmp/wine" WINEDEBUG=-all
mkdir "$tmp/build" # where the tests write
under_wine() { (cd "$tmp" && timeout 300 wine "$@"); }
check "ranks as threads" under_wine "$tmp/05_allreduce.exe" --ranks 2 --max 64K
check "the main job" under_wine "$tmp/02_mnist.exe" --workers 2 --codec onebit --epochs 1 --out "$tmp"
check "the trainer's tests" under_wine "$tmp/test_trainer.exe"
grep -E '^[0-9]+ passed' "$tmp/out"
wineserver -k 2>/dev/null
echo "$passed passed, $failed failed, 0 skipped"
[ $failed -eq 0 ]

#!/bin/sh
# The CUDA backend on this machine's GPU: every test in a process of its own, as a kernel's fault spoils all that follows in it; a
# few under compute-sanitizer, which is slow, too. Seven minutes at most.
. tests/gpu.sh
passed=0 failed=0 skipped=0 log=build/log/gpu
tool=$(command -v compute-sanitizer || command -v "${CUDA_HOME:-/usr/local/cuda}/bin/compute-sanitizer")
mkdir -p $log
rm -f $log/*
{
    build/test_gpu --list | sed 's|.*|& build/test_gpu --test &|'
    for check in memcheck:embedding memcheck:attention_in_halves memcheck:half_copies memcheck:counts memcheck:losses \
                 racecheck:masks racecheck:embedding racecheck:counts racecheck:half_copies; do
        echo "$check ${tool:-false} --tool ${check%:*} --error-exitcode 9 build/test_gpu --filter ${check#*:}"
    done
} >$log/all
timeout 420 xargs -L 1 -P 4 sh -c 'timeout 120 "$@" >build/log/gpu/$0.log 2>&1; echo $? >build/log/gpu/$0' <$log/all
while read -r name rest; do
    code=killed
    [ ! -s $log/$name ] || read -r code <$log/$name
    case $name:$code in
    *check:*:124) code=77 why='not done in 120 s' ;;
    *check:*:1) [ -n "$tool" ] || code=77 why='no compute-sanitizer' ;;
    *) why=$(sed -n 's/^skip [^(]*(\(.*\))$/\1/p' $log/$name.log) ;;
    esac
    case $code in
    0) echo "ok $name"; passed=$((passed + 1)) ;;
    77) echo "skip $name ($why)"; skipped=$((skipped + 1)) ;;
    *) echo "FAIL $name: exit $code"; head -n 30 $log/$name.log; failed=$((failed + 1)) ;;
    esac
done <$log/all
[ $passed -gt 0 ] || { echo "FAIL there is a GPU, but CUDA does not find it"; failed=$((failed + 1)); }
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ]

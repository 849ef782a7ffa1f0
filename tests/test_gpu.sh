#!/bin/sh
# The CUDA backend on this machine's GPU: every test in a process of its own, as a kernel's fault spoils what follows in
# it; a few under compute-sanitizer, which is slow, too; in the end, by itself, the one that compares clocks. Eight
# minutes at most.
. tests/gpu.sh
passed=0 failed=0 skipped=0 log=build/log/gpu alone=looks_wait_once_a_step together=4 now=$(date +%s)
tool=$(command -v compute-sanitizer || command -v "${CUDA_HOME:-/usr/local/cuda}/bin/compute-sanitizer")
nvidia-smi --query-gpu=compute_mode --format=csv,noheader 2>/dev/null | grep -q Exclusive && together=1
mkdir -p $log
rm -f $log/*
# run N UNTIL: the lines of its input, N at a time, each with all its processes for 120 s at most, none beyond UNTIL.
run() {
    UNTIL=$2 xargs -L 1 -P "$1" sh -c 'left=$((UNTIL - $(date +%s)))
        [ $left -gt 0 ] || exit 0
        timeout -k 5 $((left < 120 ? left : 120)) "$@" >build/log/gpu/$0.log 2>&1
        echo $? $left >build/log/gpu/$0'
}
{
    build/test_gpu --list | grep -vx $alone | sed 's|.*|& build/test_gpu --test &|'
    for check in memcheck:embedding memcheck:attention_in_halves memcheck:half_copies memcheck:counts memcheck:losses \
                 racecheck:masks racecheck:embedding racecheck:counts racecheck:half_copies; do
        echo "$check ${tool:-false} --tool ${check%:*} --error-exitcode 9 build/test_gpu --filter ${check#*:}"
    done
} >$log/all
run $together $((now + 400)) <$log/all
echo "$alone build/test_gpu --test $alone" | tee -a $log/all | run 1 $((now + 465))
while read -r name rest; do
    code=none left=0
    [ ! -s $log/$name ] || read -r code left <$log/$name
    why=$(sed -n 's/^skip [^(]*(\(.*\))$/\1/p' $log/$name.log 2>/dev/null)
    case $name:$code in
    *:none | *:124 | *:137) [ "$left" -ge 120 ] || code=77 why='not done when the time was up' ;;
    esac
    case $name:$code in
    *check:*:124 | *check:*:137) code=77 why='not done in 120 s' ;;
    *check:*:1) [ -n "$tool" ] || code=77 why='no compute-sanitizer' ;;
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

#!/bin/sh
# The CUDA backend on this machine's GPU: every test in a process of its own, as a kernel's fault spoils what follows in
# it; a few under compute-sanitizer, which is slow, too. Each result is printed as it ends. HPML_TEST_SECONDS (480) for
# all, 120 for each at most; the logs are in build/log/gpu. HPML_GPU=1: a test of this script, without a GPU.
log=build/log/gpu
if [ "$1" = --one ]; then # NAME COMMAND...: in a process of its own, for xargs
    name=$2 most=120; shift 2
    left=$((UNTIL - $(date +%s)))
    [ $left -gt 0 ] || { echo "skip $name (not begun when the time was up)"; exit 0; }
    [ $left -ge $most ] || most=$left
    timeout -k 5 $most "$@" >$log/$name.log 2>&1
    code=$? text="FAIL $name: exit $code"
    case $name:$code in
    *check:*:124 | *check:*:137) code=77 text="skip $name (not done in $most s)" ;;
    *:124 | *:137) [ $most = 120 ] || code=77 text="skip $name (not done when the time was up)" ;;
    *check:*) grep -q 'Device not supported' $log/$name.log && # in some virtual machines
        code=77 text="skip $name (compute-sanitizer does not support this device)" ;;
    *:77) text=$(grep '^skip ' $log/$name.log | head -n 1) ;;
    esac
    [ $code = 0 ] && text="ok $name"
    case $code in 0 | 77) ;; *) text="$text
$(head -n 30 $log/$name.log)" ;; esac
    printf '%s\n' "$text" # at once, as others print as well
    exit 0
fi
[ "$HPML_GPU" = 1 ] || . tests/gpu.sh
UNTIL=$(($(date +%s) + ${HPML_TEST_SECONDS:-480} - 10)) together=4
export UNTIL
tool=$(command -v compute-sanitizer || command -v "${CUDA_HOME:-/usr/local/cuda}/bin/compute-sanitizer")
nvidia-smi --query-gpu=compute_mode --format=csv,noheader 2>/dev/null | grep -q Exclusive && together=1
mkdir -p $log
rm -f $log/*
{
    build/test_gpu --list | grep '^[a-z_0-9]*$' | sed 's|.*|& build/test_gpu --test &|'
    # The libraries try things that fail and go on: only what kernels do counts.
    for check in memcheck:embedding memcheck:attention_in_halves memcheck:half_copies memcheck:counts memcheck:losses \
                 racecheck:masks racecheck:embedding racecheck:counts racecheck:half_copies; do
        [ -z "$tool" ] || echo "$check $tool --tool ${check%:*} --report-api-errors no --error-exitcode 9" \
            "build/test_gpu --filter ${check#*:}"
    done
} >$log/all
[ -n "$tool" ] || echo "skip 9 checks (no compute-sanitizer)"
xargs -L 1 -P $together sh tests/test_gpu.sh --one <$log/all | tee $log/results
passed=$(grep -c '^ok ' $log/results) failed=$(grep -c '^FAIL ' $log/results) skipped=$(grep -c '^skip ' $log/results)
[ -n "$tool" ] || skipped=$((skipped + 9))
[ "$passed" -gt 0 ] || { echo "FAIL there is a GPU, but CUDA does not find it"; failed=$((failed + 1)); }
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ]

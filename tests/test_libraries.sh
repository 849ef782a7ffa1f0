#!/bin/sh
# test_libraries.sh [all]: the CUDA backend's tests that reach a library, once for each way in which cuBLASLt, cuDNN and
# the recording of passes may be (library_mode in cublas_on_cpu.h), emulated and without sanitizers; all: every test. In
# all other tests they are as documented.
modes='kind gelu bgradb nchw capture refuse'
tests='large_products products_take convolutions_are a_batch_one_by_one shapes_in_turn half_copies recorded nan_
_nan_ fit_returns libraries_do trainings'
if [ "$1" = --one ]; then # MODE FILTER...: in a process of its own, for xargs
    mode=$2; shift 2
    for filter in "$@"; do
        [ "$filter" != all ] || filter=
        text=$(HPML_LIBRARIES=$mode build/test_libraries --filter "$filter" 2>&1)
        code=$?
        case $code in 0 | 77) text=$(echo "$text" | sed -n "s/^ok /ok $mode: /p") ;;
        *) text="FAIL HPML_LIBRARIES=$mode build/test_libraries --filter '$filter': exit $code
$(echo "$text" | grep -v '^ok ' | head -n 20 | sed 's/^/    /')" ;; esac
        echo "$text"
    done
    exit 0
fi
[ "$1" = all ] && tests=all
out=$(for mode in $modes; do echo $mode $tests; done | xargs -L 1 -P 2 sh tests/test_libraries.sh --one)
passed=$(echo "$out" | grep -c '^ok ') failed=$(echo "$out" | grep -c '^FAIL ')
echo "$out" | grep -v '^ok '
echo "$passed passed, $failed failed, 0 skipped"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]

#!/bin/sh
# The CUDA backend's tests with emulated libraries that refuse or deviate: once for each way in which cuBLASLt, cuDNN
# and the recording of passes may differ from their documentation (library_mode in cublas_on_cpu.h). All other tests
# have libraries as documented. A few tests that call libraries; with HPML_TEST_ALL all tests, without sanitizers.
modes='kind gelu bgradb nchw capture refuse'
tests='products_take convolutions_are relu_hides' program=build/check_cuda
[ -z "$HPML_TEST_ALL" ] || tests=all program=build/test_libraries
if [ "$1" = --one ]; then # MODE FILTER...: in a process of its own, for xargs
    mode=$2; shift 2
    for filter in "$@"; do
        [ "$filter" != all ] || filter=
        text=$(HPML_LIBRARIES=$mode $program --filter "$filter" 2>&1)
        code=$?
        case $code in 0 | 77) text=$(echo "$text" | sed -n "s/^ok /ok $mode: /p") ;;
        *) text="FAIL HPML_LIBRARIES=$mode $program --filter '$filter': exit $code
$(echo "$text" | grep -v '^ok ' | head -n 20 | sed 's/^/    /')" ;; esac
        echo "$text"
    done
    exit 0
fi
out=$(for mode in $modes; do echo $mode $tests; done | xargs -L 1 -P 2 sh tests/test_libraries.sh --one)
passed=$(echo "$out" | grep -c '^ok ') failed=$(echo "$out" | grep -c '^FAIL ')
echo "$out" | grep -v '^ok '
echo "$passed passed, $failed failed, 0 skipped"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]

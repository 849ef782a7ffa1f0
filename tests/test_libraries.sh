#!/bin/sh
# The CUDA backend's tests with emulated libraries that refuse or deviate: once for each way in which cuBLASLt, cuDNN
# and the recording of passes may differ from their documentation (library_mode in cublas_on_cpu.h). All other tests
# have libraries as documented. One test for each way; with HPML_TEST_ALL all tests.
if [ "$1" = --one ]; then # MODE FILTER: in a process of its own, for xargs
    program=build/test_cuda filter=$3
    [ "$filter" != all ] || filter=
    text=$(HPML_LIBRARIES=$2 $program --filter "$filter" 2>&1)
    code=$?
    case $code in 0 | 77) text=$(echo "$text" | sed -n "s/^ok /ok $2: /p") ;;
    *) text="FAIL HPML_LIBRARIES=$2 $program --filter '$filter': exit $code
$(echo "$text" | grep -v '^ok ' | head -n 20 | sed 's/^/    /')" ;; esac
    echo "$text"
    exit 0
fi
runs='kind products_fuse  gelu products_fuse  bgradb products_fuse  nchw convolutions_by  capture text_counts
refuse text_counts'
[ -z "$HPML_TEST_ALL" ] || runs='kind all  gelu all  bgradb all  nchw all  capture all  refuse all'
out=$(echo $runs | xargs -n 2 -P 2 sh tests/test_libraries.sh --one)
passed=$(echo "$out" | grep -c '^ok ') failed=$(echo "$out" | grep -c '^FAIL ')
echo "$out" | grep -v '^ok '
if [ "$passed" -lt 6 ]; then
    failed=$((failed + 1))
    echo "FAIL $passed tests of 6 or more ran: a filter above names no test of test_cuda.c"
fi
echo "$passed passed, $failed failed, 0 skipped"
[ "$failed" -eq 0 ]

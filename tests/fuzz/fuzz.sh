#!/bin/sh
# fuzz.sh: builds the fuzz targets with clang's libFuzzer and the sanitizers, and runs each for HPML_FUZZ_SECONDS (60),
# or HPML_FUZZ_RUNS executions; HPML_FUZZ_TARGETS: some of them; HPML_FUZZ_JOBS (1) at a time. What they find, and the
# inputs that they keep from one run to the next, are in build/fuzz. Exit: 0 nothing found, 1 something, 77 cannot.
dir=build/fuzz here=tests/fuzz
targets=${HPML_FUZZ_TARGETS:-idx gzip cifar csv text npy records safetensors checkpoint params}
if [ "$1" = --one ]; then
    limit="-max_total_time=${HPML_FUZZ_SECONDS:-60}"
    [ -n "$HPML_FUZZ_RUNS" ] && limit="-runs=$HPML_FUZZ_RUNS"
    mkdir -p $dir/found/"$2" $dir/corpus/"$2"
    longest=4096
    [ "$2" = cifar ] && longest=9300
    HPML_FUZZ_TARGET=$2 $dir/fuzz -dict=$here/dictionary -max_len=$longest "$limit" -rss_limit_mb=2500 -timeout=20 \
        -print_final_stats=1 -artifact_prefix=$dir/found/"$2"/ $dir/corpus/"$2" $dir/seeds/"$2" >$dir/"$2".log 2>&1
    echo $? >$dir/"$2".exit
    exit 0
fi
cc=clang
[ "${CC#*clang}" != "$CC" ] && cc=$CC
mkdir -p $dir/seeds
echo 'int LLVMFuzzerTestOneInput(const char *bytes, long size) { return !bytes && size; }' |
    $cc -fsanitize=fuzzer -x c - -o $dir/try 2>/dev/null || {
    echo "skipped: no clang with libFuzzer (on Debian and Ubuntu: clang and libclang-rt-NN-dev)"
    exit 77
}
if [ -z "$(find $dir/fuzz -newer hpml.h -newer $here/fuzz.c 2>/dev/null)" ]; then
    echo "compiling the targets, one minute or two"
    # shellcheck disable=SC2046 # flags are words
    $cc -g1 -O1 -DFUZZ_BODY -DHPML_NO_SIMD -DHPML_NO_THREADS -fsanitize=fuzzer,address,undefined \
        -fno-sanitize-recover=undefined $here/fuzz.c -o $dir/fuzz $(cat build/zlib.flags) -lm -lpthread || exit 1
fi
build/check_fuzz $dir/seeds >/dev/null || exit 1
rm -f $dir/*.exit
# shellcheck disable=SC2086 # one word each
echo $targets | xargs -n 1 -P "${HPML_FUZZ_JOBS:-1}" sh $here/fuzz.sh --one
bad=0
printf '%-12s %12s %10s %10s  %s\n' target executions edges features found
for t in $targets; do
    runs=$(sed -n 's/^stat::number_of_executed_units: *//p' $dir/"$t".log)
    cover=$(grep -oE 'cov: [0-9]+ ft: [0-9]+' $dir/"$t".log | tail -n 1)
    edges=${cover#cov: } found=none
    [ "$(cat $dir/"$t".exit)" = 0 ] || { found="see $dir/$t.log and $dir/found/$t" bad=1; }
    printf '%-12s %12s %10s %10s  %s\n' "$t" "${runs:-?}" "${edges%% *}" "${cover##* }" "$found"
done
exit $bad

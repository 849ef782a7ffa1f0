#!/bin/sh
# What it costs to build: seconds for the main job, the median of three; seconds of processor time for the smallest
# program, with all kernels and with those of one instruction set, the least of three; size of the binary.
row() { # CASE UNIT VALUE
    printf '{"bench": "build", "case": "%s", "unit": "%s", "hpml": %s, ' "$@" >>build/bench.jsonl
    printf '"peer": null, "peer_value": null, "ratio": null}\n' >>build/bench.jsonl
}
processor() { # OPTION...: user seconds of one compile, the least of three, because other programs only add to it
    for round in 1 2 3; do
        (${CC:-cc} -O2 "$@" -c examples/01_xor.c -o build/size_xor.o && times >build/size_times) || exit 1
        awk 'NR == 2 { split($1, t, /[ms]/); print 60 * t[1] + t[2] }' build/size_times
    done | sort -g | head -n 1
}
seconds=$(for round in 1 2 3; do
    start=$(date +%s%N); ${CC:-cc} -O2 examples/02_mnist.c -o build/size_mnist -lm -lpthread || exit 1
    awk -v a="$start" -v b="$(date +%s%N)" 'BEGIN { printf "%.2f\n", (b - a) / 1e9 }'
done) || exit 1
strip build/size_mnist
seconds=$(echo "$seconds" | sort -g | sed -n 2p) bytes=$(wc -c <build/size_mnist)
all=$(processor) one=$(processor -DHPML_NATIVE_ONLY)
[ -n "$all" ] && [ -n "$one" ] || exit 1
echo "cc -O2 examples/02_mnist.c: $seconds s, stripped binary $bytes bytes"
echo "cc -O2 examples/01_xor.c: $all s of processor time, with -DHPML_NATIVE_ONLY $one s"
row "cc -O2 02_mnist.c" s "$seconds"
row "stripped binary" bytes "$bytes"
row "cc -O2 01_xor.c, processor time" s "$all"
row "cc -O2 -DHPML_NATIVE_ONLY 01_xor.c, processor time" s "$one"

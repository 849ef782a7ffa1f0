#!/bin/sh
# What it costs to build: seconds for the main job, the median of three; size of the binary.
seconds=$(for round in 1 2 3; do
    start=$(date +%s%N); ${CC:-cc} -O2 examples/02_mnist.c -o build/size_mnist -lm -lpthread || exit 1
    awk -v a="$start" -v b="$(date +%s%N)" 'BEGIN { printf "%.2f\n", (b - a) / 1e9 }'
done) || exit 1
strip build/size_mnist
seconds=$(echo "$seconds" | sort -g | sed -n 2p) bytes=$(wc -c <build/size_mnist)
echo "cc -O2 examples/02_mnist.c: $seconds s, stripped binary $bytes bytes"
row() { # CASE UNIT VALUE
    printf '{"bench": "build", "case": "%s", "unit": "%s", "hpml": %s, ' "$@"
    printf '"peer": null, "peer_value": null, "ratio": null}\n'
}
row "cc -O2 02_mnist.c" s "$seconds" >>build/bench.jsonl
row "stripped binary" bytes "$bytes" >>build/bench.jsonl

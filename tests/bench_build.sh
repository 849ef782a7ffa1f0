#!/bin/sh
# What it costs to build: seconds for the main job, size of the binary.
start=$(date +%s%N); ${CC:-cc} -O2 examples/02_mnist.c -o build/size_mnist -lm -lpthread || exit 1; end=$(date +%s%N)
strip build/size_mnist
seconds=$(awk -v a="$start" -v b="$end" 'BEGIN { printf "%.2f", (b - a) / 1e9 }') bytes=$(wc -c <build/size_mnist)
echo "cc -O2 examples/02_mnist.c: $seconds s, stripped binary $bytes bytes"
row() { # CASE UNIT VALUE
    printf '{"bench": "build", "case": "%s", "unit": "%s", "hpml": %s, ' "$@"
    printf '"peer": null, "peer_value": null, "ratio": null}\n'
}
row "cc -O2 02_mnist.c" s "$seconds" >>build/bench.jsonl
row "stripped binary" bytes "$bytes" >>build/bench.jsonl

#!/bin/sh
# What it costs to build: seconds for the main job, size of the binary.
start=$(date +%s%N); ${CC:-cc} -O2 examples/02_mnist.c -o build/size_mnist -lm -lpthread || exit 1; end=$(date +%s%N)
strip build/size_mnist
seconds=$(awk -v a="$start" -v b="$end" 'BEGIN { printf "%.2f", (b - a) / 1e9 }') bytes=$(wc -c <build/size_mnist)
echo "cc -O2 examples/02_mnist.c: $seconds s, stripped binary $bytes bytes"
printf '{"bench": "build", "case": "cc -O2 02_mnist.c", "unit": "s", "hpml": %s, "peer": null, "peer_value": null, "ratio": null}\n' "$seconds" >>build/bench.jsonl
printf '{"bench": "build", "case": "stripped binary", "unit": "bytes", "hpml": %s, "peer": null, "peer_value": null, "ratio": null}\n' "$bytes" >>build/bench.jsonl

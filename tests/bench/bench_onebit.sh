#!/bin/sh
# What 1 bit costs in accuracy: 4 workers, the same passes with f32 and with 1 bit, the mean of five seeds. Digits drawn
# by digits.h; with MNIST's files: HPML_MNIST=FOLDER ninja bench, or sh tests/bench/bench_onebit.sh FOLDER
data=${1:-$HPML_MNIST}
number() { sed -n 's/.*"test_accuracy": *\([0-9.]*\).*/\1/p' | tail -n 1; }
mean() { # CODEC
    for seed in 1 2 3 4 5; do
        build/02_mnist --model mlp --workers 4 --threads 1 --batch 128 --lr 0.03 --epochs 15 --samples 8000 \
            ${data:+--data "$data"} --codec "$1" --seed $seed --json | number
    done | awk '{ s += 100 * $1; n++ } END { printf("%.2f", n == 5 ? s / n : "nan") }'
}
f32=$(mean none) onebit=$(mean onebit)
awk -v f="$f32" -v o="$onebit" -v set="$([ -n "$data" ] && echo mnist || echo digits)" 'BEGIN {
    name = "1 bit, accuracy of 5 seeds, " set
    printf("%-44s %12s %-10s %-22s %12s %7.2f\n", name, o, "%", "f32", f, o - f) >"/dev/stderr"
    printf("{\"bench\": \"onebit\", \"case\": \"accuracy, 5 seeds, %s\", \"unit\": \"percent\", ", set)
    printf("\"hpml\": %s, \"peer\": \"f32\", \"peer_value\": %s, \"ratio\": %.4f}\n", o, f, o / f)
    exit !(o >= f - 0.3)
}' >>build/bench.jsonl

#!/bin/sh
# Samples/s of training steps, three interleaved rounds against PyTorch where python3 has it; medians.
median() { sort -g | sed -n 2p; }
peer=0; python3 -c 'import torch' 2>/dev/null && peer=1
printf '%-8s %-8s %12s %8s %8s %11s %12s %7s\n' model threads hpml GFLOP/s of_peak first_step pytorch ratio
for threads in 1 2; do
    for model in mlp lenet cifar gpt; do
        : >build/ours; : >build/theirs
        for round in 1 2 3; do
            build/bench_train $model $threads >>build/ours
            [ $peer = 0 ] || python3 tests/bench/bench_train.py $model $threads >>build/theirs
        done
        ours=$(cut -d' ' -f1 build/ours | median) flops=$(cut -d' ' -f2 build/ours | median)
        peak=$(cut -d' ' -f3 build/ours | median) first=$(cut -d' ' -f4 build/ours | median)
        theirs=$(median <build/theirs)
        ratio=$(awk -v a="$ours" -v b="${theirs:-0}" 'BEGIN { if (b > 0) printf("%.2f", a / b); else printf("null") }')
        printf '%-8s %-8s %12s %8s %8s %8s ms %12s %7s\n' \
            $model $threads "$ours" "$flops" "$peak" "$first" "${theirs:-absent}" "$ratio"
        {
            printf '{"bench": "train", "case": "%s %st", "unit": "samples/s", "hpml": %s, ' $model $threads "$ours"
            printf '"gflops": %s, "of_peak": %s, "first_step_ms": %s, ' "$flops" "$peak" "$first"
            printf '"peer": "pytorch", "peer_value": %s, "ratio": %s}\n' "${theirs:-null}" "$ratio"
        } >>build/bench.jsonl
    done
done

#!/bin/sh
# What a second worker brings, and how much of a slow network hides behind the backward pass: medians of three rounds.
number() { sed -n "s/.*\"$1\": *\([0-9.eE+-]*\).*/\1/p" | tail -n 1; }
median() { sort -g | sed -n 2p; }
row() { # CASE UNIT OURS PEER THEIRS RATIO
    printf '%-44s %12s %-10s %-22s %12s %7s\n' "$1" "$3" "$2" "$4" "$5" "$6"
    printf '{"bench": "scale", "case": "%s", "unit": "%s", "hpml": %s, "peer": %s, "peer_value": %s, "ratio": %s}\n' "$1" "$2" "$3" "$([ "$4" = - ] && echo null || echo "\"$4\"")" "$5" "$6" >>build/bench.jsonl
}
for model in mlp cnn; do
    : >build/one; : >build/two; : >build/hidden
    batch=256; [ $model = cnn ] && batch=64
    for round in 1 2 3; do
        run="build/02_mnist --model $model --codec none --threads 1 --batch $batch --samples 12000 --json"
        $run --workers 1 --epochs 2 | number samples_per_second >>build/one
        $run --workers 2 --epochs 2 | number samples_per_second >>build/two
        $run --workers 2 --epochs 1 --samples 3000 --network 1gbit | number hidden >>build/hidden
    done
    one=$(median <build/one) two=$(median <build/two)
    row "$model, 2 workers against 1, efficiency" samples/s "$two" "1 worker x 2" "$one" "$(awk -v a="$two" -v b="$one" 'BEGIN { printf("%.2f", a / b / 2) }')"
    row "$model, 2 workers on 1 Gbit/s, f32: hidden" fraction "$(median <build/hidden)" - null null
done

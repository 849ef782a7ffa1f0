#!/bin/sh
# What a second worker brings, and how much of a slow network hides behind the backward pass: medians of three rounds.
. tests/bench/rows.sh
bench=scale
# scale: samples/s of one worker, efficiency of two, and of two that only wait for each other. hidden: what stays in
# sight of an exchange over 1 Gbit/s (milliseconds a step) when it is done during, and after, the backward pass.
for row in 'mlp 256' 'mlp 1024' 'cnn 64'; do
    : >build/scale
    for round in 1 2 3; do timeout 100 build/bench_comm scale $row >>build/scale; done
    two=$(cut -d ' ' -f 2 build/scale | median) most=$(cut -d ' ' -f 3 build/scale | median)
    row "${row% *}, batch ${row#* }: 2 workers, efficiency" fraction "$two" "2 strangers, in step" "$most" \
        "$(ratio "$two" "$most")"
done
# pipeline: 2 stages, 8 micro-batches, against one rank and what the bubble of (2 - 1) / (8 + 1) allows.
: >build/stages
for round in 1 2 3; do timeout 100 build/bench_comm pipeline wide 256 >>build/stages; done
two=$(cut -d ' ' -f 2 build/stages | median) most=$(cut -d ' ' -f 3 build/stages | median)
row "wide, batch 256: 2 stages, efficiency" fraction "$two" "without their bubble" "$most" "$(ratio "$two" "$most")"
for row in 'cnn 64' 'cnn 128' 'cnn 256'; do
    : >build/hidden
    for round in 1 2 3; do timeout 100 build/bench_comm hidden $row >>build/hidden; done
    with=$(awk '{ print $4 }' build/hidden | median) without=$(awk '{ print $10 }' build/hidden | median)
    row "${row% *}, batch ${row#* }, 1 Gbit/s: exposed" ms "$with" "no overlap" "$without" "$(ratio "$without" "$with")"
done

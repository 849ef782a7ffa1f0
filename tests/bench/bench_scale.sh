#!/bin/sh
# What a second worker brings, and how much of a slow network hides behind the backward pass: medians of three rounds.
. tests/bench/rows.sh
. tests/mpi.sh # build/bench_comm_mpi is made by bench_comm.sh
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
# split: a model divided among 2 ranks, as stages (8 micro-batches) or as halves of its layers, in turns with one rank:
# efficiency, and what the bubble of (2 - 1) / (8 + 1) allows; at the line's end the milliseconds of a step of one rank,
# of two, and of these on the first rank: computing, communication in sight (of stages: also waiting for the other one);
# the processor time of both as a multiple of one rank's.
for ranks in threads processes; do
    for axis in 'pipe wide' 'tensor pairs'; do
        : >build/split
        for round in 1 2 3; do
            if [ $ranks = threads ]; then timeout 100 build/bench_comm split $axis 256
            elif [ -x build/bench_comm_mpi ]; then timeout 100 "$mpiexec" $mpi_options -n 2 build/bench_comm_mpi \
                split $axis 256; fi >>build/split
        done
        [ -s build/split ] || continue
        for k in 1 2 3 4 5 6 7; do eval "v$k=\$(cut -d ' ' -f $k build/split | median)"; done
        row "${axis#* }, batch 256, 2 $ranks: ${axis% *}=2, efficiency" fraction "$v5" "without a bubble" "$v6" \
            "$(ratio "$v5" "$v6")" "  $v1, $v2: $v3, $v4 ms; $v7"
    done
done
for row in 'cnn 64' 'cnn 128' 'cnn 256'; do
    : >build/hidden
    for round in 1 2 3; do timeout 100 build/bench_comm hidden $row >>build/hidden; done
    with=$(awk '{ print $4 }' build/hidden | median) without=$(awk '{ print $10 }' build/hidden | median)
    row "${row% *}, batch ${row#* }, 1 Gbit/s: exposed" ms "$with" "no overlap" "$without" "$(ratio "$without" "$with")"
done

#!/bin/sh
# hpml on this machine's GPU beside cuBLASLt and PyTorch; rows are added to build/bench.jsonl. Within 9 minutes: 4 of
# them are PyTorch's, most of which go into its compiler.
. tests/gpu.sh
peers=build/bench_gpu.peers failed=0
nvidia-smi --query-gpu=name,driver_version,power.limit,clocks.max.sm --format=csv,noheader
printf '%-46s %10s %-10s %-18s %10s %7s\n' case hpml unit peer peer_value ratio
for group in kernels matmul attention train; do
    [ $group != attention ] || timeout 240 python3 tests/bench/bench_gpu.py 150 >$peers ||
        echo "PyTorch: not all there, exit $?"
    timeout 90 build/bench_gpu $group $peers || { echo "$group: exit $?"; failed=1; }
done
exit $failed

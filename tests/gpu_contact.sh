#!/bin/sh
# gpu_contact.sh first|speed|peers|nccl [FOLDER]: what one call on a machine with a GPU can tell, in LIMIT seconds (540)
# at most: does it run, how fast, how fast are others, do several GPUs train as one. Each stage has a limit of its own
# and a log in FOLDER (build/gpu_contact), which is kept also when the stage is killed; a table of the stages comes
# last. Exit 1: a stage failed. Needs nvcc and a C compiler; ninja shares the build among the cores, but may be missing.
# On a machine without a GPU the programs are built, the smoke test runs in the emulation, and the rest is skipped.
what=${1:-first} out=${2:-${OUT:-build}/gpu_contact} began=$(date +%s) limit=${LIMIT:-540} rows= bad=0
case $what in first | speed | peers | nccl) ;; *) echo "gpu_contact.sh first|speed|peers|nccl [FOLDER]"; exit 2 ;; esac
mkdir -p "$out" build/log
left() { echo $((limit - $(date +%s) + began)); }
row() { rows="$rows$(printf '%-16s %5s s  %s' "$1" "$2" "$3")
"; echo "=== $1: $3"; }
table() {
    cp build/bench.jsonl "$out" 2>/dev/null
    printf '\n=== %s, %s s\n%s' "$what" $(($(date +%s) - began)) "$rows" | tee "$out/table"
    exit $bad
}
name=start from=$began
trap 'bad=1; row "$name" $(($(date +%s) - from)) "FAILED: interrupted"; table' INT TERM HUP
# stage NAME SECONDS COMMAND: runs it, within its own limit and that of the whole
stage() {
    name=$1 most=$2 from=$(date +%s); shift 2
    [ "$(left)" -gt 5 ] || { bad=1; row "$name" 0 "FAILED: no time was left"; return 1; }
    [ "$most" -lt "$(left)" ] || most=$(left)
    timeout -k 5 "$most" sh -c "$*" >"$out/$name.log" 2>&1 </dev/null
    code=$? took=$(($(date +%s) - from))
    tail -n "${TAIL:-12}" "$out/$name.log"
    case $code in
    0) row "$name" $took ok; return 0 ;;
    124 | 137) row "$name" $took "FAILED: not done in $most s" ;;
    *) row "$name" $took "FAILED: exit $code, $out/$name.log" ;;
    esac
    bad=1
    return 1
}
# gpu NAME SECONDS COMMAND: a stage for a GPU
gpu() { if [ -z "$lack" ]; then stage "$@"; else row "$1" 0 "SKIP: $lack"; fi; }
have() { command -v "$1" >/dev/null 2>&1; }
gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU') lack=
have "${NVCC:-nvcc}" || lack='no nvcc (NVCC names one)'
[ "$gpus" -gt 0 ] || lack='no GPU (nvidia-smi -L names none)'

TAIL=25 stage machine 60 'nvidia-smi; ${NVCC:-nvcc} --version | tail -n 2; ${CC:-cc} --version | head -n 1; nproc
    ninja --version; ldd --version | head -n 1; ncu --version | tail -n 1
    python3 -c "import torch; print(torch.__version__, torch.version.cuda, torch.backends.cudnn.version())"
    sh tests/probe.sh '"$out"'/nvcc.found; cat '"$out"'/nvcc.found; echo; sh tests/doctor.sh; true'
# What build.ninja builds, by hand.
by_hand='set -e; one() { echo "$*"; "$@"; }; apart="-DHPMLI_BODY_INCLUDED -DHPML_COMM_BODY -DHPML_CUDA_BODY"
    sh tests/probe.sh build/zlib.flags; zlib=$(cat build/zlib.flags)
    one ${CC:-cc} -O2 ${zlib%-lz} -c -x c tests/private_api.c -o build/hpml.o'
by_hand_gpu=$by_hand'; sh tests/probe.sh build/nvcc.found
    one ${CC:-cc} -O2 -DHPML_COMM_IMPLEMENTATION -c -x c hpml_comm.h -o build/comm.o
    one ${CC:-cc} -O2 -c tests/test_cuda.c -o build/test_cuda.o
    one sh tests/nvcc.sh build/cuda_body.o -c tests/cuda_body.cu
    one sh tests/nvcc.sh build/test_gpu build/test_cuda.o build/cuda_body.o build/hpml.o
    one sh tests/nvcc.sh build/bench_gpu $apart tests/bench/bench_gpu.cu build/cuda_body.o build/hpml.o
    for name in 10_mnist_cuda 11_gpt2 12_nccl_data_parallel; do
        comm=; [ $name != 12_nccl_data_parallel ] || comm=build/comm.o
        one sh tests/nvcc.sh build/$name $apart examples/$name.cu build/cuda_body.o build/hpml.o $comm
    done'
by_hand_cpu=$by_hand'
    one ${CXX:-c++} -std=c++17 -O1 -c tests/emulator/cuda_on_cpu.cc -o build/cuda_on_cpu.o
    one ${CC:-cc} -O1 tests/test_cuda.c build/hpml.o build/cuda_on_cpu.o -o build/test_cuda $zlib -lstdc++ -lm \
        -lpthread -ldl'
programs='build/test_gpu build/bench_gpu build/11_gpt2 build/10_mnist_cuda build/12_nccl_data_parallel'
if have "${NINJA:-ninja}"; then by_hand_gpu="ninja $programs" by_hand_cpu='ninja build/test_cuda'; fi
if have "${NVCC:-nvcc}"; then TAIL=5 stage build 300 "$by_hand_gpu" || lack='it was not built'
else row build 0 'SKIP: no nvcc (NVCC names one)'; fi
case $what in
first)
    smoke='failed=; for test in counts_and_squares ops_in_f32 large_products_in_halves attention_in_halves; do
        $program --test $test || failed=1; done; [ -z "$failed" ]'
    if [ "$gpus" -gt 0 ]; then gpu smoke 60 "program=build/test_gpu; $smoke"
    else
        TAIL=5 stage build_emulated 240 "$by_hand_cpu" &&
            stage smoke_emulated 120 "program=build/test_cuda; $smoke"
    fi
    TAIL=70 gpu tests 240 'HPML_TEST_SECONDS=235 sh tests/test_gpu.sh'
    tar czf "$out/tests.tgz" build/log/gpu 2>/dev/null
    gpu gpt2_log 40 'CUBLASLT_LOG_LEVEL=5 CUBLASLT_LOG_FILE='"$out"'/cublaslt.log build/11_gpt2 --steps 2'
    gzip -f "$out/cublaslt.log" 2>/dev/null
    TAIL=30 gpu gpt2 90 'for b in 8 16 32; do build/11_gpt2 --steps 40 --batch $b --json || exit; done
        build/11_gpt2 --steps 6 --profile'
    gpu mnist 40 'CUDNN_LOGLEVEL_DBG=1 CUDNN_LOGDEST_DBG=stderr build/10_mnist_cuda --precision bf16 &&
        build/12_nccl_data_parallel --gpus 1 --epochs 1' ;;
speed)
    TAIL=12 gpu ladder 60 'sh tests/nvcc.sh build/ladder_matmul -gencode arch=compute_90a,code=sm_90a \
        examples/ladder_matmul.cu && build/ladder_matmul'
    for group in attention train matmul kernels; do TAIL=60 gpu bench_$group 90 "build/bench_gpu $group"; done
    if [ -z "$lack" ] && ! have ncu; then row ncu 0 'SKIP: no ncu'
    else
        tensor=sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed
        TAIL=5 gpu ncu 120 'ncu --clock-control none --csv --launch-skip 700 --launch-count 330 --metrics ' \
            gpu__time_duration.sum,dram__bytes.sum,$tensor 'build/11_gpt2 --steps 4'
    fi ;;
peers)
    if [ -z "$lack" ] && ! python3 -c 'import torch' 2>/dev/null; then row peers 0 'SKIP: no PyTorch'
    else TAIL=40 gpu peers 330 'PYTHONUNBUFFERED=1 python3 tests/bench/bench_gpu.py 200'; fi
    grep '"case"' "$out/peers.log" >build/bench_gpu.peers 2>/dev/null
    for group in attention train; do TAIL=40 gpu bench_$group 90 "build/bench_gpu $group build/bench_gpu.peers"; done ;;
nccl)
    [ -n "$lack" ] || [ "$gpus" -gt 1 ] || lack='one GPU, and NCCL joins two and more'
    gpu nccl 120 'NCCL_DEBUG=WARN build/12_nccl_data_parallel'
    gpu nccl_onebit 120 'NCCL_DEBUG=WARN build/12_nccl_data_parallel --onebit'
    gpu nccl_log 60 'NCCL_DEBUG=INFO build/12_nccl_data_parallel --epochs 1' ;;
esac
table

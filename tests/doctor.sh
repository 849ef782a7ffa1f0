#!/bin/sh
# Prints what this machine has, and what is skipped for lack of it. Exit status 0: the demo and the tests can be built.
row() { printf '%-8s %-36.36s %s\n' "$1" "$2" "$3"; }
cure() { echo "         $1" | fold -s -w 79; }
have() { command -v "$1" >/dev/null 2>&1; }
cc=${CC:-cc} nvcc=${NVCC:-nvcc} bad=0 tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
if have "$cc"; then row cc "$($cc --version | head -n 1)" ok
else row cc none "run: sh tests/install.sh"; exit 1; fi
have ninja && row ninja "$(ninja --version)" ok || row ninja none "run: sh tests/install.sh"
printf '#define HPML_IMPLEMENTATION\n#include "hpml.h"\nint main(void) { hpml_ctx *c = hpml_ctx_create(NULL);
printf("%%s kernels, %%d threads", hpml_ctx_cpu(c), hpml_ctx_threads(c)); hpml_ctx_free(c); return 0; }\n' >"$tmp/cpu.c"
if $cc -O1 -I. "$tmp/cpu.c" -o "$tmp/cpu" -lm -lpthread 2>"$tmp/err"; then row cpu "$("$tmp/cpu")" ok
else row cpu none "hpml.h does not compile:"; cure "$(head -n 1 "$tmp/err")"; bad=1; fi
have clang && row clang "$(clang --version | head -n 1)" ok || row clang none "compile tests use only $cc"
if printf '#include <zlib.h>\nint main(void) { return 0; }\n' | $cc -x c - -o /dev/null -lz 2>/dev/null
then row zlib found "gzipped data files are read"; else row zlib none "gunzip data files first"; fi
. tests/mpi.sh
if have "$mpicc" || have "$mpiexec"; then
    version=$("$mpiexec" --version 2>/dev/null |
        sed -n 's/^ *Version: */MPICH /p; s/^.*(\(Open[^)]*\)) *\([0-9]\)/\1 \2/p' | head -n 1)
    lack=$(mpi_lacks "$tmp")
    if [ -z "$lack" ]; then row mpi "${version:-MPI of unknown version}, two ranks meet" ok
    else row mpi "${version:-MPI of unknown version}" "MPI examples and tests are skipped:"; cure "$lack"; fi
else row mpi none "workers are threads of one process"; fi
sh tests/probe.sh "$tmp/nvcc.found"
if have "$nvcc"; then
    cuda=$(dirname "$(dirname "$(readlink -f "$(command -v "$nvcc")")")")
    release=$($nvcc --version | sed -n 's/.*release \([0-9.]*\).*/\1/p')
    printf '#include <cmath>\n__global__ void k(float *x) { *x = sinf(*x); }\n' >"$tmp/two.cu"
    if $nvcc ${NVCC_CCBIN:+-ccbin="$NVCC_CCBIN"} -c "$tmp/two.cu" -o "$tmp/two.o" >"$tmp/err" 2>&1
    then row nvcc "release $release compiles a kernel" "ninja cuda builds GPU examples"
    else
        row nvcc "release $release" "does not compile a kernel:"
        if grep -q 'exception specification' "$tmp/err"
        then cure "$(ldd --version | head -n 1) is too new for CUDA $release, whose headers declare cospi and others \
differently: a newer CUDA, or a container with an older glibc. $(grep -m 1 'exception spec' "$tmp/err")"
        elif grep -q 'unsupported.*version' "$tmp/err"
        then cure "the host compiler is too new for CUDA $release: set NVCC_CCBIN=g++-13, or the newest it knows"
        else cure "$(grep -m 1 -i error "$tmp/err" || head -n 1 "$tmp/err")"; fi
    fi
    for name in cublas cudnn; do
        lack=HPML_CUDA_NO_$(echo $name | tr a-z A-Z)
        grep -q "$lack" "$tmp/nvcc.found" && row $name none "hpml's own kernels instead" || row $name header ok
    done
    grep -q NCCL "$tmp/nvcc.found" && row nccl header ok || row nccl none "GPUs exchange by host memory"
    have compute-sanitizer || [ -x "$cuda/bin/compute-sanitizer" ] && row sanitize compute-sanitizer ok ||
        row sanitize none "test-gpu without its checks"
else row nvcc none "nothing is compiled for GPUs"; fi
gpu=$(nvidia-smi --query-gpu=name,driver_version,compute_cap --format=csv,noheader 2>/dev/null | head -n 1)
if [ -z "$gpu" ]; then row gpu none "kernels are tested by emulation"
elif [ -e /dev/nvidiactl ] && [ ! -w /dev/nvidiactl ]; then row gpu "$gpu" "not for this user: /dev/nvidiactl"
elif have "$nvcc"; then row gpu "$gpu" "ninja test-gpu, ninja bench-gpu"
else row gpu "$gpu" "install the CUDA toolkit for it"; fi
ldconfig -p 2>/dev/null | grep -q openblas && row blas OpenBLAS "ninja bench compares with it" ||
    row blas none "ninja bench has no peer"
have aarch64-linux-gnu-gcc &&
    row aarch64 "cross compiler" "$(have qemu-aarch64 && echo 'runs under qemu' || echo 'compile only')" ||
    row aarch64 none "aarch64 tests are skipped"
ctags --version 2>/dev/null | grep -q Universal && row ctags "universal-ctags" ok ||
    row ctags none "one check of the headers is skipped"
row cores "$(getconf _NPROCESSORS_ONLN)" ok
memory=$(awk '/^MemAvailable/ { printf("%.1f", $2 / 1048576) }' /proc/meminfo 2>/dev/null)
if awk -v free="${memory:-4}" 'BEGIN { exit !(free < 3) }'; then row memory "$memory GB free" "the tests want 3 GB"
else row memory "${memory:-?} GB free" ok; fi
have ninja || bad=1
[ $bad = 0 ] && echo "ninja demo and ninja test can run here" || echo "ninja demo cannot run here yet"
exit $bad

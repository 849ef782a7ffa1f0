#!/bin/sh
# What this machine has, and what will be skipped for lack of it.
row() { printf '%-8s %-44s %s\n' "$1" "$2" "$3"; }
have() { command -v "$1" >/dev/null 2>&1; }
cc=${CC:-cc} mpicc=${MPICC:-mpicc} mpiexec=${MPIEXEC:-mpiexec} nvcc=${NVCC:-nvcc} tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
if have "$cc"; then row cc "$($cc --version | head -n 1)" ok; else row cc none "install build-essential"; exit 1; fi
printf '#define HPML_IMPLEMENTATION\n#include "hpml.h"\nint main(void) { hpml_ctx *c = hpml_ctx_create(NULL);
printf("%%s kernels, %%d threads", hpml_ctx_cpu(c), hpml_ctx_threads(c)); hpml_ctx_free(c); return 0; }\n' >"$tmp/cpu.c"
if $cc -O1 -I. "$tmp/cpu.c" -o "$tmp/cpu" -lm -lpthread 2>"$tmp/err"; then row cpu "$("$tmp/cpu")" ok
else row cpu "$(head -n 1 "$tmp/err")" "hpml.h does not compile"; fi
have clang && row clang "$(clang --version | head -n 1)" ok || row clang none "compile tests use $cc only"
if printf '#include <zlib.h>\nint main(void) { return 0; }\n' | $cc -x c - -o /dev/null -lz 2>/dev/null
then row zlib found "gzipped data files are read"; else row zlib none "gunzip data files first"; fi
if have "$mpicc" && have "$mpiexec"; then
    cat >"$tmp/mpi.c" <<'C'
#include <mpi.h>
#include <stdio.h>
int main(int c, char **v)
{
    int n, r;
    MPI_Init(&c, &v);
    MPI_Comm_size(MPI_COMM_WORLD, &n);
    MPI_Comm_rank(MPI_COMM_WORLD, &r);
    if (r == 0) printf("%d", n);
    MPI_Finalize();
    return 0;
}
C
    ranks=none
    $mpicc "$tmp/mpi.c" -o "$tmp/mpi" 2>/dev/null && ranks=$(timeout 30 "$mpiexec" -n 2 "$tmp/mpi" 2>/dev/null)
    [ "$ranks" = 2 ] && row mpi "2-rank job has 2 ranks" ok ||
        row mpi "2-rank job reports: $ranks" "mpicc and mpiexec do not fit together"
else row mpi none "in-process workers only"; fi
sh tests/probe.sh "$tmp/nvcc.found"
if have "$nvcc"; then
    cuda=$(dirname "$(dirname "$(readlink -f "$(command -v "$nvcc")")")")
    row nvcc "$($nvcc --version | grep release | sed 's/.*release/release/')" "ninja cuda builds the GPU examples"
    for name in cublas cudnn; do
        lack=HPML_CUDA_NO_$(echo $name | tr a-z A-Z)
        grep -q "$lack" "$tmp/nvcc.found" && row $name none "built with $lack: own kernels" || row $name header ok
    done
    grep -q NCCL "$tmp/nvcc.found" && row nccl header ok || row nccl none "GPUs exchange gradients through host memory"
    have compute-sanitizer || [ -x "$cuda/bin/compute-sanitizer" ] && row sanitize compute-sanitizer ok ||
        row sanitize none "test-gpu leaves out memcheck and racecheck"
else row nvcc none "nothing is built or compile-tested for GPUs"; fi
gpu=$(nvidia-smi --query-gpu=name,driver_version,compute_cap --format=csv,noheader 2>/dev/null | head -n 1)
[ -n "$gpu" ] && row gpu "$gpu" "test-gpu, bench-gpu" ||
    row gpu none "test-gpu and bench-gpu are skipped; an emulation tests the kernels"
ldconfig -p 2>/dev/null | grep -q openblas && row blas OpenBLAS "bench compares with it" ||
    row blas none "bench has no peer"
have aarch64-linux-gnu-gcc &&
    row aarch64 "cross compiler" "$(have qemu-aarch64 && echo 'runs under qemu' || echo 'compile only')" ||
    row aarch64 none "aarch64 tests are skipped"
row cores "$(getconf _NPROCESSORS_ONLN)" ok

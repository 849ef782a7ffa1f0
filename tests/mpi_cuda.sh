#!/bin/sh
# mpi_cuda.sh OUT KERNEL.cu ARGUMENTS...: nvcc compiles the kernels, mpicc the rest and links; leaves a program that
# says SKIP where one of them is missing.
out=$1 kernel=$2; shift 2
if [ -s build/nvcc.found ] && command -v "${MPICC:-mpicc}" >/dev/null; then
    sh tests/nvcc.sh "$out.kernel.o" -c "$kernel" || exit
    nvcc=$(cut -d ' ' -f 1 build/nvcc.found)
    libs=$(dirname "$(dirname "$(readlink -f "$nvcc")")")/lib64
    exec sh tests/mpicc.sh "$out" "$@" "$out.kernel.o" -L"$libs" -Wl,-rpath,"$libs" -lcudart -lstdc++
fi
printf '#!/bin/sh\necho "SKIP: nvcc or mpicc was not found when this was built"; exit 77\n' >"$out"
chmod +x "$out"

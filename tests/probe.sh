#!/bin/sh
# probe.sh FILE: what this machine has, for the rules of build.ninja. Writes only on change, so that only then things are built
# again. build/zlib.flags: flags for zlib when it is here; build/mpicc.found: where mpicc is; build/nvcc.found: where nvcc is,
# with its flags. Empty when it is not.
found=
includes() { printf '#include <%s>\n' "$1" | ${CC:-cc} -E -I"$cuda/include" -x c - >/dev/null 2>&1; }
case $1 in
*mpicc*) found=$(command -v "${MPICC:-mpicc}") ;;
*nvcc*)
    found=$(command -v "${NVCC:-nvcc}") cuda=$(dirname "$(dirname "$found")")
    arch=sm_90 # without a GPU, for one elsewhere
    nvidia-smi -L 2>/dev/null | grep -q '^GPU' && arch=native
    if [ -n "$found" ]; then
        found="$found -arch=${CUDA_ARCH:-$arch}"
        if includes cublasLt.h; then found="$found -lcublasLt -lcublas"; else found="$found -DHPML_CUDA_NO_CUBLAS"; fi
        if includes cudnn.h; then found="$found -lcudnn"; else found="$found -DHPML_CUDA_NO_CUDNN"; fi
        includes nccl.h && found="$found -DHPML_USE_NCCL"
    fi ;;
*) printf '#include <zlib.h>\nint main(void) { return zlibVersion() == 0; }\n' | ${CC:-cc} -x c - -o /dev/null -lz 2>/dev/null &&
    found='-DHPML_USE_ZLIB -lz' ;;
esac
[ -f "$1" ] && [ "$(cat "$1")" = "$found" ] || printf '%s' "$found" >"$1"

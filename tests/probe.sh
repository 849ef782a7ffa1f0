#!/bin/sh
# probe.sh FILE: what this machine has, for the rules of build.ninja. Writes only on change, so that only then things
# are built again. build/zlib.flags: flags for zlib when it is here; build/mpicc.found: where mpicc is;
# build/nvcc.found: where nvcc is, with its flags. Empty when it is not.
found=
# cuda HEADER NAME FLAGS OTHERWISE: adds FLAGS where CUDA has the header; or what they are in Python's package
# nvidia-NAME for this CUDA, whose libraries have versions in their names; else OTHERWISE. Since CUDA 13 most packages
# share the folder cu13.
cuda() {
    if printf '#include <%s>\n' "$1" | ${CC:-cc} -E -I"$toolkit/include" -x c - >/dev/null 2>&1; then
        found="$found $3"
        return
    fi
    for wheel in "$wheels/cu$major" "$wheels/$2"; do
        [ -n "$wheels" ] && [ -f "$wheel/include/$1" ] || continue
        [ "${wheel##*/}" = "cu$major" ] || ls -d "${wheels%/*}/nvidia_$2_cu$major"-* >/dev/null 2>&1 || continue
        flags="-isystem=$wheel/include -L$wheel/lib -Xlinker=-rpath,$wheel/lib" # behind CUDA's own headers
        for flag in $3; do
            case $flag in -l*)
                for lib in "$wheel/lib/lib${flag#-l}.so".*; do flag=-l:${lib##*/}; done
                [ -f "$lib" ] || continue 2 ;;
            esac
            flags="$flags $flag"
        done
        found="$found $flags"
        return
    done
    found="$found $4"
}
case $1 in
*mpicc*) found=$(command -v "${MPICC:-mpicc}") ;;
*nvcc*)
    found=$(command -v "${NVCC:-nvcc}") toolkit=$(dirname "$(dirname "$(readlink -f "$found")")")
    arch=sm_90 # without a GPU, for one elsewhere
    nvidia-smi -L 2>/dev/null | grep -q '^GPU' && arch=native
    if [ -n "$found" ]; then
        major=$("$found" --version | sed -n 's/.*release \([0-9]*\).*/\1/p')
        wheels=$(python3 -c 'import nvidia; print(list(nvidia.__path__)[0])' 2>/dev/null)
        case $wheels in *[[:space:]]*) wheels= ;; esac # flags are words
        found="$found -arch=${CUDA_ARCH:-$arch}${NVCC_CCBIN:+ -ccbin=$NVCC_CCBIN}"
        cuda cublasLt.h cublas '-lcublasLt -lcublas' -DHPML_CUDA_NO_CUBLAS
        cuda cudnn.h cudnn -lcudnn -DHPML_CUDA_NO_CUDNN
        cuda nccl.h nccl -DHPML_USE_NCCL ''
    fi ;;
*)
    printf '#include <zlib.h>\nint main(void) { return zlibVersion() == 0; }\n' |
        ${CC:-cc} -x c - -o /dev/null -lz 2>/dev/null && found='-DHPML_USE_ZLIB -lz' ;;
esac
[ -f "$1" ] && [ "$(cat "$1")" = "$found" ] || printf '%s' "$found" >"$1"

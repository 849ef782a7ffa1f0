#!/bin/sh
# nvcc.sh OUT ARGUMENTS...: compiles with the nvcc and the flags that probe.sh found (NVCC_CCBIN: its host compiler), or
# leaves a program that says SKIP where there is none, or one that cannot compile for sm_90a if ARGUMENTS want that.
out=$1; shift
found=$(cat build/nvcc.found) lack='nvcc was not found when this was built'
case $* in *sm_90a*)
    if [ -n "$found" ] && ! "${found%% *}" --help | grep -q sm_90a; then
        found= lack='this nvcc cannot compile for sm_90a; take CUDA 12'
    fi ;;
esac
if [ -n "$found" ]; then
    nvcc=${found%% *} fast= # the cores share what is compiled, where nvcc can do that (CUDA 12.4)
    "$nvcc" --help | grep -q -- '--split-compile' && fast='--split-compile 0'
    # where programs find CUDA's libraries, whatever the loader's list says
    libs=$(dirname "$(dirname "$(readlink -f "$nvcc")")")/lib64
    exec $found -std=c++17 -O2 $fast "$@" -o "$out" $(cat build/zlib.flags) -Xcompiler -pthread \
        -Xlinker -rpath,"$libs" -lm
fi
printf '#!/bin/sh\necho "SKIP: %s"; exit 77\n' "$lack" >"$out"
chmod +x "$out"

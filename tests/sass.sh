#!/bin/sh
# sass.sh OBJECT: prints the machine code of the GPU kernels in OBJECT. Exits with 77 where there is no cuobjdump: it is
# looked for in PATH, beside nvcc and in the Python packages of NVIDIA and triton.
found=$(cat build/nvcc.found) nvcc=${found%% *}
wheel=$(python3 -c 'import nvidia; print(list(nvidia.__path__)[0])' 2>/dev/null)
for dump in "$(command -v cuobjdump)" "${nvcc%/*}/cuobjdump" "$wheel"/cu*/bin/cuobjdump \
    "${wheel%/*}/triton/backends/nvidia/bin/cuobjdump"; do
    [ ! -x "$dump" ] || PATH="${dump%/*}:$PATH" exec "$dump" -sass "$1"
done
exit 77

#!/bin/sh
# mpicc.sh OUT ARGUMENTS...: compiles with mpicc, or leaves a program that says SKIP where there is none.
out=$1; shift
if command -v "${MPICC:-mpicc}" >/dev/null; then
    exec "${MPICC:-mpicc}" "$@" -o "$out" $(cat build/zlib.flags) -lm -lpthread
fi
printf '#!/bin/sh\necho "SKIP: mpicc was not found when this was built"; exit 77\n' >"$out"
chmod +x "$out"

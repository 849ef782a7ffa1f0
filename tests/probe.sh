#!/bin/sh
# probe.sh FILE: what this machine has, for the rules of build.ninja. Writes only on change, so that only then things are built
# again. build/zlib.flags: flags for zlib when it is here; build/mpicc.found: where mpicc is. Empty when it is not.
found=
case $1 in
*mpicc*) found=$(command -v "${MPICC:-mpicc}") ;;
*) printf '#include <zlib.h>\nint main(void) { return zlibVersion() == 0; }\n' | ${CC:-cc} -x c - -o /dev/null -lz 2>/dev/null &&
    found='-DHPML_USE_ZLIB -lz' ;;
esac
[ -f "$1" ] && [ "$(cat "$1")" = "$found" ] || printf '%s' "$found" >"$1"

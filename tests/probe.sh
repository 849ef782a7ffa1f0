#!/bin/sh
# Flags for zlib when it is here, nothing when it is not. Writes only on change.
cc=${CC:-cc}
if printf '#include <zlib.h>\nint main(void) { return zlibVersion() == 0; }\n' | $cc -x c - -o /dev/null -lz 2>/dev/null; then
    flags='-DHPML_USE_ZLIB -lz'
else
    flags=''
fi
[ -f "$1" ] && [ "$(cat "$1")" = "$flags" ] || printf '%s' "$flags" >"$1"

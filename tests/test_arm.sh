#!/bin/sh
# hpml.h for ARM: it compiles without a warning, and all ops have the right gradients with NEON and scalar kernels under
# qemu. With HPML_TEST_ALL all tests of ops, which take minutes. Skipped (77) without a compiler for ARM.
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
skip() { echo "skipped: $1"; exit 77; }
strict='-Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wstrict-prototypes -Werror'
command -v aarch64-linux-gnu-gcc >/dev/null || skip "no aarch64-linux-gnu-gcc"
if aarch64-linux-gnu-gcc -std=c99 -O1 $strict -DHPML_IMPLEMENTATION -x c -c hpml.h -o "$tmp/hpml.o"
then echo "ok it compiles"; else echo "FAIL hpml.h does not compile"; exit 1; fi
command -v qemu-aarch64 >/dev/null || {
    echo "skip 1 checks (no qemu-aarch64)"
    echo "1 passed, 0 failed, 1 skipped"
    exit 0
}
aarch64-linux-gnu-gcc -std=gnu11 -O1 tests/test_ops.c "$tmp/hpml.o" -o "$tmp/ops" -lm -lpthread || exit 1
[ -n "$HPML_TEST_ALL" ] || set -- --test gradients_on_all_kernels
qemu-aarch64 -L /usr/aarch64-linux-gnu "$tmp/ops" "$@"

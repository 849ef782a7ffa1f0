#!/bin/sh
# examples/hpml.py: the library by ctypes: it compiles the header, learns, saves, loads, predicts and raises errors; a
# field of another size, a batch of another size and a field that does not exist are errors. Skipped (77) without
# python3.
tmp=$(mktemp -d) passed=0 failed=0
trap 'rm -rf "$tmp"' EXIT
command -v python3 >/dev/null || { echo "skipped: no python3"; exit 77; }
export TMPDIR=$tmp HPML_PYTHON_FLAGS='-O0 -DHPML_NO_SIMD' PYTHONDONTWRITEBYTECODE=1
check() { # NAME CONDITION
    if eval "$2"; then passed=$((passed + 1))
    else failed=$((failed + 1)); echo "FAIL $1"; tail -n 5 "$tmp/out"; fi
}
says() { grep -q "$1" "$tmp/out"; }
python3 examples/hpml.py >"$tmp/out" 2>&1
check "the exclusive or is learned, saved, loaded" '[ $? -eq 0 ] && says "accuracy 1.00" && says "^answers: 0 1 1 0"'
check "errors of the library are raised" 'says "an error: add: .* do not fit"'
cat >"$tmp/wrong.py" <<'END'
import array, sys
sys.path.insert(0, "examples")
import hpml
for name, call in (("size", lambda: ctx.trainer(4, input=x, output=x.linear(2)).step(array.array("f", [0]), b"")),
                   ("field", lambda: x.linear(2, nme="a")), ("layer", lambda: x.conv2d(2, kernel_h=3))):
    with hpml.Context(seed=1, threads=1) as ctx:
        x = ctx.input(4, 2)
        try:
            call()
            print(name, "passed")
        except hpml.Error as e:
            print(name + ":", e)
END
python3 "$tmp/wrong.py" >"$tmp/out" 2>&1
check "a batch of another size" 'says "^size: 32 bytes in one piece are needed .* 4 came"'
check "a field that does not exist" 'says "^field: hpml_linear_desc has no field nme here; it has name"'
check "a layer that does not fit" 'says "^layer: conv2d"'
sed 's/"seed": "q"/"seed": "i"/' examples/hpml.py >"$tmp/hpml.py" && cp hpml.h "$tmp"
python3 "$tmp/hpml.py" >"$tmp/out" 2>&1
check "a field of another size" 'says "hpml_ctx_desc.seed has 8 bytes in the library, 4 here"'
echo "$passed passed, $failed failed, 0 skipped"
[ $failed -eq 0 ]

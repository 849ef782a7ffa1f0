#!/bin/sh
# The examples do what they say, quickly: small runs of each.
passed=0 failed=0 tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
check() { if eval "$2"; then passed=$((passed + 1)); else failed=$((failed + 1)); echo "FAIL $1"; tail -n 5 "$tmp/out"; fi; }
number() { sed -n "s/.*\"$1\": *\\([0-9.eE+-]*\\).*/\\1/p" "$tmp/out" | tail -n 1; }
above() { awk -v a="$(number "$1")" -v b="$2" 'BEGIN { exit !(a != "" && a + 0 >= b) }'; }
build/01_xor >"$tmp/out" 2>&1
check "xor is learned" 'grep -q "accuracy 1.00" "$tmp/out"'
build/04_embed_cpp >"$tmp/out" 2>&1
check "the header inside a C++ program" '[ $? -eq 0 ] && grep -q residual "$tmp/out"'
build/02_mnist --samples 4000 --epochs 3 --json >"$tmp/out" 2>&1
check "generated digits" 'above test_accuracy 0.9'
build/02_mnist --samples 3000 --epochs 3 --model linear --codec onebit --json >"$tmp/out" 2>&1
check "linear model, 1-bit gradients" 'above test_accuracy 0.6'
build/02_mnist --samples 2000 --epochs 2 --model mlp --seed 5 --threads 1 --json >"$tmp/out" 2>&1; one=$(tail -n 1 "$tmp/out" | grep -o '"weights_hash": *"[^"]*"')
build/02_mnist --samples 2000 --epochs 2 --model mlp --seed 5 --threads 3 --json >"$tmp/out" 2>&1; three=$(tail -n 1 "$tmp/out" | grep -o '"weights_hash": *"[^"]*"')
check "the same bits with 1 and 3 threads" '[ -n "$one" ] && [ "$one" = "$three" ]'
build/02_mnist --samples 2000 --epochs 2 --stop 1 --model mlp --save "$tmp/a.safetensors" --json >"$tmp/out" 2>&1
build/02_mnist --samples 2000 --epochs 2 --model mlp --load "$tmp/a.safetensors" --json >"$tmp/out" 2>&1; resumed=$(tail -n 1 "$tmp/out" | grep -o '"weights_hash": *"[^"]*"')
build/02_mnist --samples 2000 --epochs 2 --model mlp --json >"$tmp/out" 2>&1; whole=$(tail -n 1 "$tmp/out" | grep -o '"weights_hash": *"[^"]*"')
check "resumed in a new process: the same bits" '[ -n "$whole" ] && [ "$resumed" = "$whole" ]'
build/02_mnist --data /nonexistent >"$tmp/out" 2>&1
check "a missing folder is an error" '[ $? -ne 0 ] && grep -q nonexistent "$tmp/out"'
build/03_charlm --steps 60 --json hpml.h >"$tmp/out" 2>&1
check "character model" 'grep -q bits_per_character "$tmp/out"'
echo "$passed passed, $failed failed, 0 skipped"
[ $failed -eq 0 ]

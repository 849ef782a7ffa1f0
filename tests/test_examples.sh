#!/bin/sh
# The examples do what they say, quickly: small runs of each.
passed=0 failed=0 skipped=0 tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
check() {
    if eval "$2"; then passed=$((passed + 1))
    else failed=$((failed + 1)); echo "FAIL $1"; tail -n 5 "$tmp/out"; fi
}
number() { sed -n "s/.*\"$1\": *\\([0-9.eE+-]*\\).*/\\1/p" "$tmp/out" | tail -n 1; }
above() { awk -v a="$(number "$1")" -v b="$2" 'BEGIN { exit !(a != "" && a + 0 >= b) }'; }
says() { grep -q "$1" "$tmp/out"; }
hash_of() { "$@" --json >"$tmp/out" 2>&1; tail -n 1 "$tmp/out" | grep -o '"weights_hash": *"[^"]*"'; }
build/01_xor >"$tmp/out" 2>&1
check "xor is learned" 'grep -q "accuracy 1.00" "$tmp/out"'
build/04_embed_cpp >"$tmp/out" 2>&1
check "the header inside a C++ program" '[ $? -eq 0 ] && grep -q residual "$tmp/out"'
rm -f build/loss.csv build/loss.svg build/trace.json
# as where numbers have a comma: in what is for programs they have none
printf 'LC_NUMERIC\ndecimal_point ","\nthousands_sep "."\ngrouping 3;3\nEND %s\n' LC_NUMERIC >"$tmp/comma"
localedef -c -i "$tmp/comma" "$tmp/comma_XX" >"$tmp/out" 2>&1
LOCPATH=$tmp LC_ALL=comma_XX build/02_mnist --samples 4000 --epochs 3 --json >"$tmp/out" 2>&1
cnn=$(number test_accuracy)
check "generated digits" 'above test_accuracy 0.9'
check "a JSON object at the end" 'above train_seconds 0.001 && above samples_per_second 1 &&
    above parameters 215370 && above bytes_sent 0 &&
    tail -n 1 "$tmp/out" | grep -q "\"weights_hash\": \"[0-9a-f]*\"}$"'
check "a line in loss.csv for each of 189 steps" \
    '[ "$(wc -l <build/loss.csv)" = 190 ] && tail -n 1 build/loss.csv | grep -q "^189\(,[0-9.]*\)\{4\}$"'
check "its columns: as they were, and smoothed" \
    '[ "$(head -n 1 build/loss.csv)" = step,loss,accuracy,loss_smoothed,accuracy_smoothed ] &&
        awk -F, "NR == 2 { s = \$2 } NR > 2 { s += (\$2 - s) / 20; d = s - \$4; if (d * d > 1e-9) bad = 1 }
            END { exit bad }" build/loss.csv'
check "a plot and a timeline" 'tail -n 1 build/loss.svg | grep -q "</svg>" &&
    [ "$(tail -n 1 build/trace.json)" = "]" ] && grep -q "\"conv0 backward\"" build/trace.json'
build/02_mnist --samples 4000 --epochs 3 --model linear --codec onebit --json >"$tmp/out" 2>&1
check "linear model, 1-bit gradients, clearly below the CNN" \
    'above test_accuracy 0.6 && ! above test_accuracy "$(awk "BEGIN { print $cnn - 0.05 }")"'
mkdir "$tmp/t10k" # MNIST's test files alone, of 2100 black digits: the last 2000 are for the test
{ printf '\0\0\10\3\0\0\10\64\0\0\0\34\0\0\0\34'; head -c 1646400 /dev/zero; } >"$tmp/t10k/t10k-images-idx3-ubyte"
{ printf '\0\0\10\1\0\0\10\64'; head -c 2100 /dev/zero; } >"$tmp/t10k/t10k-labels-idx1-ubyte"
build/02_mnist --data "$tmp/t10k" --model linear --epochs 1 >"$tmp/out" 2>&1
check "a folder of test files" \
    'says " 100 training digits" && says "accuracy 100.00 % on 2000 digits" && says "^confusion"'
mkdir "$tmp/few"
{ printf '\0\0\10\3\0\0\0\5\0\0\0\34\0\0\0\34'; head -c 3920 /dev/zero; } >"$tmp/few/t10k-images-idx3-ubyte"
printf '\0\0\10\1\0\0\0\5\0\0\0\0\0' >"$tmp/few/t10k-labels-idx1-ubyte"
build/02_mnist --data "$tmp/few" >"$tmp/out" 2>&1
check "too few to be both" '[ $? -eq 1 ] && says "no train-images-idx3-ubyte.*no more than 2,000 digits"'
gzip "$tmp"/t10k/* && build/02_mnist --data "$tmp/t10k" --model linear --epochs 1 >"$tmp/out" 2>&1
check "gzipped" 'if grep -q lz build/zlib.flags; then says " 100 training digits"; else says "is gzipped"; fi'
one=$(hash_of build/02_mnist --samples 2000 --epochs 2 --model mlp --seed 5 --threads 1)
three=$(hash_of build/02_mnist --samples 2000 --epochs 2 --model mlp --seed 5 --threads 3)
check "the same bits with 1 and 3 threads" '[ -n "$one" ] && [ "$one" = "$three" ]'
build/02_mnist --samples 2000 --epochs 2 --stop 1 --model mlp --save "$tmp/a.safetensors" --json >"$tmp/out" 2>&1
resumed=$(hash_of build/02_mnist --samples 2000 --epochs 2 --model mlp --load "$tmp/a.safetensors")
whole=$(hash_of build/02_mnist --samples 2000 --epochs 2 --model mlp)
check "resumed in a new process: the same bits" '[ -n "$whole" ] && [ "$resumed" = "$whole" ]'
build/02_mnist --samples 1000 --epochs 1 --model linear --workers 2 --steps-table 3 >"$tmp/out" 2>&1
check "a table of the last steps" 'says "^ *16    1 .* [1-9][0-9]*$" && says "^  mean " && says bubble'
one=$(hash_of build/02_mnist --samples 500 --epochs 1 --threads 1 --layout nhwc --workspace 64)
three=$(hash_of build/02_mnist --samples 500 --epochs 1 --threads 3 --layout nhwc --workspace 64)
check "in NHWC, by im2col: the same bits with 1 and 3 threads" '[ -n "$one" ] && [ "$one" = "$three" ]'
build/02_mnist --data /nonexistent >"$tmp/out" 2>&1
check "a missing folder is an error" '[ $? -ne 0 ] && grep -q nonexistent "$tmp/out"'
build/02_mnist --codec 1bit >"$tmp/out" 2>&1
check "a choice that is none is an error" '[ $? -eq 2 ] && grep -q "expected one of none bf16 onebit" "$tmp/out"'
build/02_mnist --lr fast >"$tmp/out" 2>&1
check "a number that is none is an error" '[ $? -eq 2 ] && grep -q "lr fast: expected a number" "$tmp/out"'
if [ -n "$HPML_MNIST" ]; then # real data, where they are
    build/02_mnist --data "$HPML_MNIST" --model mlp --json >"$tmp/out" 2>&1
    check "mlp on MNIST: 95 %" 'above test_accuracy 0.95'
    build/02_mnist --data "$HPML_MNIST" --json >"$tmp/out" 2>&1
    check "cnn on MNIST: 98 %" 'above test_accuracy 0.98'
else skipped=$((skipped + 2)); fi
if [ -n "$HPML_TEXT" ]; then
    build/03_charlm --json "$HPML_TEXT" >"$tmp/out" 2>&1
    check "Shakespeare's plays: 1.75 nats on what it has not seen" \
        'above validation_loss 0.5 && ! above validation_loss 1.75'
else skipped=$((skipped + 1)); fi
build/03_charlm --steps 0 >"$tmp/out" 2>&1
check "no steps are an error" '[ $? -eq 2 ]'
build/03_charlm --steps 20 --json hpml.h >"$tmp/out" 2>&1
check "character model" 'grep -q bits_per_character "$tmp/out"'
hash() { hash_of "$@" --samples 2000 --epochs 1 --model mlp --exact; }
one=$(hash build/02_mnist)
for workers in 2 3 4 6 8; do
    many=$(hash build/02_mnist --workers $workers --allreduce ring)
    check "exact: the same bits with $workers workers as with one" '[ -n "$one" ] && [ "$many" = "$one" ]'
done
plain=$(hash build/02_mnist --codec none)
for how in '2 auto' '3 central' '3 native' '4 tree' '4 butterfly' '6 ring' '6 halving' '8 hierarchical' \
    '4 auto onebit'; do
    set -- $how
    many=$(hash timeout 60 mpiexec -n $1 build/02_mnist_mpi --transport mpi --allreduce $2 --codec ${3:-none})
    want=$plain; [ $# -eq 2 ] || want=$one
    check "exact: the same bits under mpiexec -n $how" '[ "$many" = "$want" ] || ! command -v mpicc >/dev/null'
done
build/02_mnist --workers 4 --model mlp --json >"$tmp/out" 2>&1
check "4 workers, 1 bit" 'above test_accuracy 0.95'
for codec in none onebit; do # a thread for each worker and one in its background, under ThreadSanitizer
    [ -x build/race_mnist ] || { skipped=$((skipped + 1)); continue; }
    build/race_mnist --workers 4 --samples 800 --epochs 2 --codec $codec >"$tmp/out" 2>&1
    check "4 workers, $codec: no data race" '[ $? -eq 0 ] && ! says ThreadSanitizer'
done
build/02_mnist --workers 4 --samples 2000 --epochs 2 --stop 1 --model mlp --save "$tmp/b.safetensors" --json \
    >"$tmp/out" 2>&1
build/02_mnist --workers 2 --samples 2000 --epochs 2 --model mlp --load "$tmp/b.safetensors" --json >"$tmp/out" 2>&1
check "saved by 4 workers, loaded by 2" 'above test_accuracy 0.7'
build/05_allreduce --ranks 4 --max 65536 >"$tmp/out" 2>&1
check "all algorithms agree" '[ $? -eq 0 ]'
moved() {
    where=$2
    HPML_RUN=$1 build/05_allreduce --max 4096 --algorithm ring >"$tmp/out" 2>&1
    check "HPML_RUN=$1" 'says "^# $where,"'
}
moved serial '1 ranks, transport threads'; moved threads:3 '3 ranks, transport threads'
moved clock:2 '2 ranks, transport clock'
HPML_RUN=mpi timeout 60 mpiexec -n 2 build/05_allreduce_mpi --max 4096 --algorithm ring >"$tmp/out" 2>&1
check "HPML_RUN=mpi" 'grep -q "^# 2 ranks, transport mpi," "$tmp/out" || ! command -v mpicc >/dev/null'
build/06_onebit_dropin >"$tmp/out" 2>&1
check "1 bit dropped into a program" '[ $? -eq 0 ] && grep -q "^onebit" "$tmp/out"'
check "in five lines" '[ "$(grep -o "/\* [0-9] \*/$" examples/06_onebit_dropin.c | sort -u | wc -l)" = 5 ]'
build/08_simulate --model gpt2 --network 10gbit --ranks 256 >"$tmp/out" 2>&1
check "simulated machines" '[ $? -eq 0 ] && grep -q "148 layers, 124.4 M" "$tmp/out" && grep -q "^   256 |" "$tmp/out"'
check "a forecast below 50 % warns" \
    'says "^256 ranks, f32.*efficiency [0-4]*[0-9] %, below 50 %: .* batches [0-9.]* times as large"'
names="central  *tree  *ring  *butterfly  *halving hierarchical$"
check "six algorithms with f32 and bf16, four packed, and three plots" '[ "$(grep -c "$names" "$tmp/out")" = 2 ] &&
    says "1-bit  *2-bit  *top-k 1 %  *low rank 2$" &&
    [ "$(grep -c "^build/simulate_.*svg is drawn" "$tmp/out")" = 3 ] &&
    [ "$(grep -c "<polyline" build/simulate_packed.svg)" = 4 ]'
build/08_simulate --model gpt2 --network 1gbit --ranks 64 >"$tmp/out" 2>&1
# bf16 takes half as long as f32, 2 bits between 1 bit and bf16, and all that is packed is faster
times='
    /^ +64 / { n++; for (i = 3; i <= NF; i++) { t[n, i] = $i + 0; bad += !(t[n, i] > 0) } }
    END {
        half = t[2, 5] / t[1, 5]
        exit !(n == 3 && !bad && half > 0.49 && half < 0.55 && t[3, 3] < t[3, 4] && t[3, 4] < t[2, 5] &&
               t[3, 5] < t[1, 5] && t[3, 6] < t[3, 3])
    }'
check "1 Gbit/s, 64 ranks: half as long with bf16, less when packed" 'awk "$times" "$tmp/out"'
timeout 60 build/09_queue >"$tmp/out" 2>&1
check "spread strands fewer GPUs than pack" \
    'awk "/^pack/ { p = \$6 } /^spread/ { s = \$6; n = 1 } END { exit !(n && s < p) }" "$tmp/out"'
build/08_simulate --layers /nonexistent >"$tmp/out" 2>&1
check "a missing file of layers is an error" '[ $? -ne 0 ] && grep -q nonexistent "$tmp/out"'
echo "$passed passed, $failed failed, $skipped skipped"
[ $failed -eq 0 ]

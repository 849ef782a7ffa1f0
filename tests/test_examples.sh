#!/bin/sh
# Small runs of each example, with a check of what it prints and writes; with HPML_TEST_ALL more of them.
. tests/mpi.sh
passed=0 failed=0 skipped=0 tmp=$(mktemp -d)
files=$tmp/files
trap 'rm -rf "$tmp"' EXIT
check() {
    if eval "$2"; then passed=$((passed + 1))
    else failed=$((failed + 1)); echo "FAIL $1"; tail -n 5 "$tmp/out"; fi
}
# skip N REASON: N checks are left out.
skip() { skipped=$((skipped + $1)); echo "skip $1 checks ($2)"; }
number() { sed -n "s/.*\"$1\": *\\([0-9.eE+-]*\\).*/\\1/p" "$tmp/out" | tail -n 1; }
above() { awk -v a="$(number "$1")" -v b="$2" 'BEGIN { exit !(a != "" && a + 0 >= b) }'; }
says() { grep -q "$1" "$tmp/out"; }
# What examples print fits a terminal of 80 columns; --help lists the options.
fits() { # COMMAND...: "$tmp/out" ends with the lines that are too wide; returns the exit status
    build/terminal 80 "$@" >"$tmp/lines" 2>&1
    code=$?
    sed 's/\r$//' "$tmp/lines" >"$tmp/out"
    if [ $code = 77 ]; then
        skip 1 "no pseudo-terminal"
        "$@" >"$tmp/out" 2>&1
        return
    fi
    check "80 columns: $*" '[ $code -eq 0 ]'
    return $code
}
mnist() { build/02_mnist --out "$files" "$@"; } # leaves what the demo has drawn in build/ alone
hash_of() { "$@" --out "$files" --json >"$tmp/out" 2>&1; tail -n 1 "$tmp/out" | grep -o '"weights_hash": *"[^"]*"'; }
build/01_xor >"$tmp/out" 2>&1
check "xor is learned" 'grep -q "accuracy 1.00" "$tmp/out"'
build/25_model_file "$tmp/house" >"$tmp/out" 2>&1
check "a model in a file" '[ $? -eq 0 ] && says "^mean error [0-9]*\." && says "2.5 km: 3[5-8][0-9] thousand euros$"'
build/25_model_file "$tmp/house" 60 3 1 >"$tmp/out" 2>&1
check "a model from its file" '[ $? -eq 0 ] && says "1.0 km: 2[0-9]* thousand euros$"'
build/07_digits >"$tmp/out" 2>&1
check "digits in one file" 'says "^test accuracy 9[0-9]" && says "^pass 3"'
build/07_digits "$tmp/none" >"$tmp/out" 2>&1
check "a folder without MNIST" '[ $? -eq 1 ] && says "none/train-images-idx3-ubyte.*cannot open"'
build/04_embed_cpp >"$tmp/out" 2>&1
check "the header inside a C++ program" '[ $? -eq 0 ] && grep -q residual "$tmp/out"'
for program in 1_tensors 2_ops 3_data 4_messages 5_steps 6_plans 7_parts; do
    build/tour_$program >"$tmp/out" 2>&1
    check "the tour: $program" '[ $? -eq 0 ] && ! says WRONG'
done
build/26_own_loop >"$tmp/out" 2>&1
check "a training loop of one's own" 'awk "/^largest gradient error/ { good += \$4 < 1e-2 }
    /^error without noise/ { good += \$4 < 0.3 } END { exit good != 2 }" "$tmp/out"'
build/27_static_memory >"$tmp/out" 2>&1
check "prediction in static memory" 'says "^0 allocations" && [ "$(tail -n 1 "$tmp/out")" = "0 1 1 0" ]'
build/28_own_strategy >"$tmp/out" 2>&1
check "a strategy of one's own" '[ "$(grep -c "accuracy 8[5-9]" "$tmp/out")" = 3 ] &&
    awk "{ sent[NR] = \$(NF - 5) } END { exit !(sent[2] < sent[3] && sent[3] < sent[1]) }" "$tmp/out"'
fits build/35_schedule
check "six schedules of one algorithm: equal weights, bytes as predicted" \
    '[ $? -eq 0 ] && [ "$(grep -c " [0-9a-f]\{16\}$" "$tmp/out")" = 6 ]'
fits build/40_define_by_run
check "a graph recorded anew in each step: gradients of the static one" \
    '[ $? -eq 0 ] && says "have the same bits$" && says "^recorded anew, blocks with ink"'
fits build/38_tune --check
check "a search by halves: one of the best two settings, the same bits on any ranks; an ensemble" \
    '[ $? -eq 0 ] && says "^26 epochs of 64$" && says "^checked: same bits .* number [12] of the grid$"'
HPML_RUN=threads:3 build/38_tune --json >"$tmp/out" 2>&1
check "a line of JSON for each run: setting, accuracy, version, seed, plan, measured times" '[ $? -eq 0 ] &&
    [ "$(grep "^{\"width\": .*\"accuracy\": .*{\"hpml\": " "$tmp/out" |
        grep -c "\"seed\": 1, .*,exact=1,.*\"measured\": {.*}}}$")" = 14 ]'
# In a locale with decimal commas: files and JSON must have points.
printf 'LC_NUMERIC\ndecimal_point ","\nthousands_sep "."\ngrouping 3;3\nEND %s\n' LC_NUMERIC >"$tmp/comma"
localedef -c -i "$tmp/comma" "$tmp/comma_XX" >"$tmp/out" 2>&1
LOCPATH=$tmp LC_ALL=comma_XX build/02_mnist --out "$files" --samples 4000 --epochs 3 --json >"$tmp/out" 2>&1
cnn=$(number test_accuracy)
check "generated digits" 'above test_accuracy 0.9'
check "a JSON object at the end" 'above train_seconds 0.001 && above samples_per_second 1 &&
    above parameters 215370 && above bytes_sent 0 &&
    tail -n 1 "$tmp/out" | grep -q "\"weights_hash\": \"[0-9a-f]*\"}$"'
check "a line in loss.csv for each of 189 steps" \
    '[ "$(wc -l <"$files/loss.csv")" = 190 ] && tail -n 1 "$files/loss.csv" | grep -q "^189\(,[0-9.]*\)\{4\}$"'
check "its columns: as they were, and smoothed" \
    '[ "$(head -n 1 "$files/loss.csv")" = step,loss,accuracy,loss_smoothed,accuracy_smoothed ] &&
        awk -F, "NR == 2 { s = \$2 } NR > 2 { s += (\$2 - s) / 20; d = s - \$4; if (d * d > 1e-9) bad = 1 }
            END { exit bad }" "$files/loss.csv"'
check "a plot and a timeline" 'tail -n 1 "$files/loss.svg" | grep -q "</svg>" &&
    [ "$(tail -n 1 "$files/trace.json")" = "]" ] && grep -q "\"conv0 backward\"" "$files/trace.json"'
mkdir "$tmp/black" # MNIST's files, of 200 black digits that are all a 0
for part in train t10k; do
    { printf '\0\0\10\3\0\0\0\310\0\0\0\34\0\0\0\34'; head -c 156800 /dev/zero; } |
        gzip >"$tmp/black/$part-images-idx3-ubyte.gz"
    { printf '\0\0\10\1\0\0\0\310'; head -c 200 /dev/zero; } | gzip >"$tmp/black/$part-labels-idx1-ubyte.gz"
done
program=$PWD/build/29_mnist
if grep -q lz build/zlib.flags; then
    (cd "$tmp/black" && "$program") >"$tmp/out" 2>&1
    check "MNIST in 30 lines" '[ $? -eq 0 ] && says "^epoch 19" && says "first test digit is a 0; 100.0 %" &&
        [ "$(grep -c "^{\"epoch_end\":" "$tmp/black/mnist.jsonl")" = 20 ]'
else skip 1 "no zlib"; fi
mnist --samples 4000 --epochs 3 --model linear --codec onebit --json >"$tmp/out" 2>&1
check "linear model, 1-bit gradients, clearly below the CNN" \
    'above test_accuracy 0.6 && ! above test_accuracy "$(awk "BEGIN { print $cnn - 0.05 }")"'
mkdir "$tmp/t10k" # MNIST's test files alone, of 2100 black digits: the last 2000 are for the test
{ printf '\0\0\10\3\0\0\10\64\0\0\0\34\0\0\0\34'; head -c 1646400 /dev/zero; } >"$tmp/t10k/t10k-images-idx3-ubyte"
{ printf '\0\0\10\1\0\0\10\64'; head -c 2100 /dev/zero; } >"$tmp/t10k/t10k-labels-idx1-ubyte"
mnist --data "$tmp/t10k" --model linear --epochs 1 >"$tmp/out" 2>&1
check "a folder of test files" \
    'says " 100 training digits" && says "accuracy 100.00 % on 2000 digits" && says "^confusion"'
mkdir "$tmp/few"
{ printf '\0\0\10\3\0\0\0\5\0\0\0\34\0\0\0\34'; head -c 3920 /dev/zero; } >"$tmp/few/t10k-images-idx3-ubyte"
printf '\0\0\10\1\0\0\0\5\0\0\0\0\0' >"$tmp/few/t10k-labels-idx1-ubyte"
mnist --data "$tmp/few" >"$tmp/out" 2>&1
check "too few to be both" '[ $? -eq 1 ] && says "no train-images-idx3-ubyte.*no more than 2,000 digits"'
gzip "$tmp"/t10k/* && mnist --data "$tmp/t10k" --model linear --epochs 1 >"$tmp/out" 2>&1
check "gzipped" 'if grep -q lz build/zlib.flags; then says " 100 training digits"; else says "is gzipped"; fi'
one=$(hash_of env HPML_RUN=threads:3 build/02_mnist --samples 600 --epochs 1 --model mlp)
three=$(hash_of env HPML_RUN=fork:3 build/02_mnist --samples 600 --epochs 1 --model mlp)
check "the same bits on 3 threads and 3 processes" '[ -n "$one" ] && [ "$one" = "$three" ]'
one=$(hash_of build/02_mnist --samples 2000 --epochs 2 --model mlp --seed 5 --threads 1)
three=$(hash_of build/02_mnist --samples 2000 --epochs 2 --model mlp --seed 5 --threads 3)
check "the same bits with 1 and 3 threads" '[ -n "$one" ] && [ "$one" = "$three" ]'
build/02_mnist --out "$files" --samples 2000 --epochs 2 --model mlp --seed 5 --checkpoint "$tmp/mnist" \
    >"$tmp/out" 2>&1 &
sleep 0.2 && kill -INT $! 2>"$tmp/err"
wait
again=$(hash_of build/02_mnist --samples 2000 --epochs 2 --model mlp --seed 5 --checkpoint "$tmp/mnist")
check "a training goes on that Ctrl-C has interrupted" '[ -n "$again" ] && [ "$one" = "$again" ]'
mnist --samples 2000 --epochs 2 --stop 1 --model mlp --save "$tmp/a.safetensors" --json >"$tmp/out" 2>&1
resumed=$(hash_of build/02_mnist --samples 2000 --epochs 2 --model mlp --load "$tmp/a.safetensors")
whole=$(hash_of build/02_mnist --samples 2000 --epochs 2 --model mlp)
check "resumed in a new process: the same bits" '[ -n "$whole" ] && [ "$resumed" = "$whole" ]'
mnist --samples 1000 --epochs 1 --model linear --workers 2 --steps-table 3 >"$tmp/out" 2>&1
check "a table of the last steps" 'says "^ *16    1 .* [1-9][0-9]*$" && says "^  mean " && says bubble'
one=$(hash_of build/02_mnist --samples 500 --epochs 1 --threads 1 --layout nhwc --workspace 64)
three=$(hash_of build/02_mnist --samples 500 --epochs 1 --threads 3 --layout nhwc --workspace 64)
check "in NHWC, by im2col: the same bits with 1 and 3 threads" '[ -n "$one" ] && [ "$one" = "$three" ]'
mnist --data /nonexistent >"$tmp/out" 2>&1
check "a missing folder is an error" '[ $? -ne 0 ] && grep -q nonexistent "$tmp/out"'
mnist --codec 1bit >"$tmp/out" 2>&1
check "a choice that is none is an error" '[ $? -eq 2 ] && grep -q "expected one of none|bf16|onebit" "$tmp/out"'
for precision in ${HPML_TEST_ALL:+bf16 f16}; do
    mnist --samples 4000 --epochs 3 --precision $precision --json >"$tmp/out" 2>&1
    check "results stored as $precision" 'above test_accuracy 0.9 && says "results as $precision"'
done
mnist --lr fast >"$tmp/out" 2>&1
check "a number that is none is an error" '[ $? -eq 2 ] && says "lr fast: expected a number of at least 0"'
if [ -n "$HPML_MNIST" ]; then # real data, where they are
    mnist --data "$HPML_MNIST" --model mlp --json >"$tmp/out" 2>&1
    check "mlp on MNIST: 95 %" 'above test_accuracy 0.95'
    mnist --data "$HPML_MNIST" --json >"$tmp/out" 2>&1
    check "cnn on MNIST: 98 %" 'above test_accuracy 0.98'
else skip 2 "HPML_MNIST names no folder"; fi
if [ -n "$HPML_TEXT" ]; then
    build/03_charlm --json "$HPML_TEXT" >"$tmp/out" 2>&1
    check "Shakespeare's plays: 1.75 nats on what it has not seen" \
        'above validation_loss 0.5 && ! above validation_loss 1.75'
else skip 1 "HPML_TEXT names no file"; fi
build/03_charlm --steps 0 >"$tmp/out" 2>&1
check "no steps are an error" '[ $? -eq 2 ]'
build/03_charlm --steps 2 --batch 2 --length 300 --json hpml.h >"$tmp/out" 2>&1
check "character model" 'grep -q bits_per_character "$tmp/out"'
hash() { hash_of "$@" --samples 2000 --epochs 1 --model mlp --exact; }
one=$(hash build/02_mnist)
for workers in 3 ${HPML_TEST_ALL:+2 4 6 8}; do
    many=$(hash build/02_mnist --workers $workers --allreduce ring)
    check "exact: the same bits with $workers workers as with one" '[ -n "$one" ] && [ "$many" = "$one" ]'
done
plain=$(hash build/02_mnist --codec none)
lack=$(mpi_lacks "$tmp")
[ -z "$lack" ] || skip 4 "$lack"
for how in 2,auto 3,native 4,auto,onebit \
    ${HPML_TEST_ALL:+3,central 4,tree 4,butterfly 6,ring 6,halving 8,hierarchical}; do
    [ -z "$lack" ] || break
    set -- $(echo $how | tr , ' ')
    many=$(hash timeout 60 "$mpiexec" $mpi_options -n $1 build/02_mnist_mpi --transport mpi --allreduce $2 \
        --codec ${3:-none})
    want=$plain; [ $# -eq 2 ] || want=$one
    check "exact: the same bits under mpiexec -n $how" '[ "$many" = "$want" ]'
done
mnist --workers 4 --model mlp --json >"$tmp/out" 2>&1
check "4 workers, 1 bit" 'above test_accuracy 0.95'
# Under ThreadSanitizer: each worker is two threads, one of which exchanges gradients. Convolutions take long there.
for run in ${HPML_TEST_ALL:+mlp,onebit mlp,none cnn,none cnn,onebit}; do
    [ -x build/race_mnist ] || { skip 1 "build/race_mnist is not built"; continue; }
    build/race_mnist --out "$files" --workers 4 --samples 800 --epochs 2 --model ${run%,*} --codec ${run#*,} \
        >"$tmp/out" 2>&1
    check "4 workers, $run: no data race" '[ $? -eq 0 ] && ! says ThreadSanitizer'
done
mnist --workers 4 --samples 2000 --epochs 2 --stop 1 --model mlp --save "$tmp/b.safetensors" --json \
    >"$tmp/out" 2>&1
mnist --workers 2 --samples 2000 --epochs 2 --model mlp --load "$tmp/b.safetensors" --json >"$tmp/out" 2>&1
check "saved by 4 workers, loaded by 2" 'above test_accuracy 0.7'
build/05_allreduce --draw "$tmp/tree.svg" --algorithm tree --ranks 8 >"$tmp/out" 2>&1
check "a space-time diagram" '[ $? -eq 0 ] && says "14 messages, 917504 bytes, .*, longest chain 6" &&
    says "^rank   1  >\.*0\.*$" && [ "$(grep -c "marker-end" "$tmp/tree.svg")" -eq 14 ]'
build/05_allreduce --ranks 4 --max 8192 >"$tmp/out" 2>&1
check "all algorithms agree" '[ $? -eq 0 ]'
build/05_allreduce --ranks 3 --op all -b 64 -e 4096 -f 8 -n 2 -w 1 >"$tmp/out" 2>&1 # blocks of different sizes
code=$?
names='auto|reduce_scatter|allgather|broadcast|reduce|gather|scatter|all_to_all'
check "all collectives are right" '[ $code -eq 0 ] && [ "$(grep -cE "^($names) .* ok$" "$tmp/out")" = 24 ]'
build/05_allreduce -b 64 -e 8 >"$tmp/out" 2>&1
check "sizes that make no sense" '[ $? -eq 2 ] && says "^-b: at least 4; -e: at least -b"'
moved() {
    where=$2
    HPML_RUN=$1 build/05_allreduce --max 4096 --algorithm ring >"$tmp/out" 2>&1
    check "HPML_RUN=$1" 'says "^# $where,"'
}
moved serial '1 ranks, transport threads'; moved threads:3 '3 ranks, transport threads'
moved clock:2 '2 ranks, transport clock'; moved fork:4 '4 ranks, transport fork'
if [ -z "$lack" ]; then
    HPML_RUN=mpi timeout 60 "$mpiexec" $mpi_options -n 2 build/05_allreduce_mpi --max 4096 --algorithm ring \
        >"$tmp/out" 2>&1
    check "HPML_RUN=mpi" 'says "^# 2 ranks, transport mpi,"'
fi
build/06_onebit_dropin >"$tmp/out" 2>&1
check "1 bit dropped into a program" '[ $? -eq 0 ] && grep -q "^onebit" "$tmp/out"'
check "in five lines" '[ "$(grep -o "/\* [0-9] \*/$" examples/06_onebit_dropin.c | sort -u | wc -l)" = 5 ]'
build/08_simulate --out "$files" --model gpt2 --network 10gbit --ranks 256 >"$tmp/out" 2>&1
check "simulated machines" '[ $? -eq 0 ] && grep -q "148 layers, 124.4 M" "$tmp/out" && says "^  256|"'
check "a forecast below 50 % warns" 'tr "\n" " " <"$tmp/out" |
    grep -q "256 ranks, f32.*efficiency [0-4]*[0-9] %, below 50 %: .* batches [0-9.]* times as large"'
names="central  *tree  *ring  *butterfly  *halving hierarchical$"
check "six algorithms with f32 and bf16, four packed, and three plots" '[ "$(grep -c "$names" "$tmp/out")" = 2 ] &&
    says "1-bit  *2-bit  *top-k 1 %  *low rank 2$" &&
    [ "$(grep -c "^$files/simulate_.*svg is drawn" "$tmp/out")" = 3 ] &&
    [ "$(grep -c "<polyline" "$files/simulate_packed.svg")" = 4 ]'
build/30_forecast --out "$files" --model gpt2 --machine t4 --ranks 8 --forecasts 20 >"$tmp/out" 2>&1
check "ten plans, what decides, what binds, and a plot" '[ $? -eq 0 ] && says "^ 1 .* ms " && says "^10 .* ms " &&
    says "^best: " && says "^head .* flops$" && says "^memory binds" &&
    [ "$(grep -c "<polyline" "$files/forecast.svg")" = 2 ]'
build/08_simulate --out "$files" --model gpt2 --network 1gbit --ranks 64 >"$tmp/out" 2>&1
# bf16 takes half as long as f32, 2 bits between 1 bit and bf16, and all that is packed is faster
times='
    { sub(/\|/, " | ") }
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
fits timeout 60 build/14_pipeline
check "a drawing of six schedules" \
    '[ $? -eq 0 ] && [ "$(grep -c "in flight" "$tmp/out")" = 6 ] && says "^  3 \.*0" &&
        tail -n 1 build/pipeline_stash.svg | grep -q "</svg>"'
timeout 60 build/14_pipeline --json gpipe 1f1b interleaved zero_bubble >"$tmp/out" 2>&1
check "bubbles in virtual time are those of the formula" \
    'awk -F "[:,]" "{ d = \$10 - \$12; if (d * d > 1e-6) bad = 1 } END { exit NR != 4 || bad }" "$tmp/out"'
HPML_PLAN=pipe=2,schedule=interleaved,micro=4 timeout 60 build/14_pipeline --json >"$tmp/out" 2>&1
check "the same program by HPML_PLAN" 'says "\"interleaved\", \"stages\": 2, \"micro\": 4"'
timeout 60 build/14_pipeline 1f1b --uneven --tasks >"$tmp/out" 2>&1
check "tasks of the stages, uneven layers" '[ $? -eq 0 ] && says "^  F0 B0 F1 B1 F2 B2" && says "^70.7 ms a step"'
fits timeout 60 build/15_tensor_parallel --steps 5
check "a GPT on 4 ranks, split in two: 4 sums a block" \
    '[ $? -eq 0 ] && says "sums, 4 in each of 2 blocks" && says "(blocks: 262144)"'
for layers in 2 3; do
    HPML_RUN=clock:8 HPML_PLAN=tensor=4 timeout 60 build/15_tensor_parallel --steps 2 --layers $layers --json || echo no
done >"$tmp/out" 2>&1
check "HPML_PLAN splits it in four; a further block makes 4 sums more" \
    'awk -F "[:,]" "/\"tensor\": 4,/ { d = \$10 - d; n++ } END { exit n != 2 || d != 4 }" "$tmp/out"'
HPML_PLAN=tensor=3 timeout 60 build/15_tensor_parallel >"$tmp/out" 2>&1
check "a product of axes that is not the number of ranks" '[ $? -eq 1 ] && says "4 ranks are no multiple of tensor 3"'
fits timeout 60 build/19_large_model --steps 4
check "a GPT that one rank has no memory for trains on 4" '[ $? -eq 0 ] && says "^one rank with .* out of memory"'
HPML_PLAN=shard=2 timeout 60 build/19_large_model --steps 2 --json >"$tmp/out" 2>&1
check "HPML_PLAN says what a rank keeps: below 0.6 of the memory of one rank" \
    '[ $? -eq 0 ] && awk -F "[:,]" "{ exit !(\$11 < 0.6 * \$13) }" "$tmp/out"'
HPML_PLAN=pipe=2,schedule=1f1b timeout 60 build/19_large_model --run clock:8 --width 1024 --measure >"$tmp/out" 2>&1
check "what 8 ranks with stages and shards would need, by hpml_distribute_memory" \
    '[ $? -eq 0 ] && grep -c "^rank [0-7]: [0-9]" "$tmp/out" | grep -qx 8 && says "^plan pipe=2,.*shard=3"'
HPML_PLAN=pipe=4,micro=2 timeout 60 build/19_large_model --steps 2 --json >"$tmp/out" 2>&1
check "four stages, each with an equal loss" '[ $? -eq 0 ] && says "\"plan\": \"pipe=4"'
fits timeout 60 build/16_gossip
check "the spread shrinks by the second eigenvalue" \
    'awk "/ of 8: spread/ { n++; d = \$6 - \$11; if (d * d > 0.02 * 0.02 * \$11 * \$11 + 1e-9) bad = 1 }
        END { exit n != 4 || bad }" "$tmp/out"'
timeout 60 build/17_plans --json "" strategy=local,period=50 >"$tmp/out" 2>&1
check "local SGD sends less and takes less time on a slow network" \
    '[ $? -eq 0 ] && awk -F "[:,]" "NR == 1 { b = \$8; s = \$10 } NR == 2 { bad = !(\$9 * 10 < b && \$11 * 4 < s) }
        END { exit NR != 2 || bad }" "$tmp/out" && above accuracy 0.8 &&
        grep -c "\"weights_hash\": \"[0-9a-f]\{16\}\"}$" "$tmp/out" | grep -q 2'
timeout 60 build/17_plans strategy=gossip,codec=onebit >"$tmp/out" 2>&1
check "a plan that is refused" '[ $? -eq 1 ] && says "codec is for strategies that send gradients"'
fits timeout 60 build/13_parameter_server
check "a parameter server by hand" '[ $? -eq 0 ] && says "^test accuracy [89].* 800 gradients, 4 workers"'
one=$(HPML_RUN=clock:4 build/13_parameter_server --steps 40 --slow 3 | tail -n 1)
two=$(HPML_RUN=clock:4 build/13_parameter_server --steps 40 --slow 3 | tail -n 1)
check "in virtual time the same bits twice" '[ -n "$one" ] && [ "$one" = "$two" ]'
HPML_RUN=clock:4 build/13_parameter_server --bound 3 --slow 4 --lose 50 >"$tmp/out" 2>&1
check "a bound of 3 steps; a worker is lost" \
    '[ $? -eq 0 ] && says "450 gradients.*largest lead 3$" && says "1 of 4 ranks lost"'
if [ -z "$lack" ]; then
    HPML_RUN=mpi timeout 60 "$mpiexec" $mpi_options -n 3 build/13_parameter_server_mpi --bound 0 >"$tmp/out" 2>&1
    check "a parameter server under mpiexec" '[ $? -eq 0 ] && says "400 gradients, 2 workers.*largest lead 0$"'
    HPML_RUN=mpi timeout 60 "$mpiexec" $mpi_options -n 3 build/13_parameter_server_mpi --lose 50 >"$tmp/out" 2>&1
    check "that loses a worker" \
        '[ $? -ne 124 ] && says "250 gradients, 2 workers" && says "worker 0 fails in step 50"'
fi
timeout 60 build/21_federated --mixed --samples 4000 --rounds 4 --goal 0.75 --json >"$tmp/out" 2>&1
check "federated averaging with masks" '[ $? -eq 0 ] && says "\"masked_sum_is_exact\": true"'
fits timeout 60 build/22_experts --steps 30
check "experts and ring attention by four plans" 'awk "
    /^one rank|=2 / { n++; last = \$(NF - 4); alone = n == 1 ? last : alone; bad += !(last < 1.05 * alone) }
    END { exit n != 4 || bad || !(alone < 2) }" "$tmp/out"'
fits timeout 60 build/23_presets --steps 20
check "Mariana's three engines: dense layers by rows send less, sparse tables what they touch" \
    'awk "/^dp/ { dp = \$NF } /^trick/ { t = \$NF } /^sparse/ { s[n++] = \$NF }
        END { exit !(n == 2 && t > 0 && t < dp / 4 && s[0] == s[1] && s[0] < 10) }" "$tmp/out"'
fits timeout 60 build/24_sparse 2000
check "a sparse table by threads without locks and by servers" \
    '[ "$(grep -c "ranks: loss 0\.[0-5].* bytes a step" "$tmp/out")" = 5 ]'
fits timeout 60 build/31_generate --steps 2 --length 24 --file "$tmp/generate.safetensors" README.md
check "text with a cache: the scores of a whole pass" 'says "scores differ by [0-9.]*e-0[5-9] at most"'
build/31_generate --kv-heads 4 >"$tmp/out" 2>&1
check "heads of keys that do not divide those of queries are an error" '[ $? -eq 2 ]'
fits timeout 60 build/36_edge
check "a net over device, edge and cloud: most samples stay on the device, for a tenth of the bytes" \
    '[ $? -eq 0 ] && [ "$(grep -c "^[01]\.[0-9]* .* %" "$tmp/out")" = 7 ] && says "^T 0\.[0-9]*: [789].* bytes$"'
HPML_RUN=threads:2 build/36_edge >"$tmp/out" 2>&1
check "36_edge: another number of ranks is an error" '[ $? -eq 1 ] && says "2 ranks, expected 3"'
fits timeout 60 build/37_compress "$tmp/net"
check "a net in 8-bit integers, and pruned, in files that are read back" \
    '[ $? -eq 0 ] && says "^int8.* [4-9]\.[0-9] times" && says "^31 values.* [2-9][0-9]\.[0-9] times" &&
        [ $(wc -c <"$tmp/net.pruned") -lt 27138 ] && says "400 damaged ones are refused"'
build/37_compress "$tmp/none/net" >"$tmp/out" 2>&1
check "37_compress: a folder that does not exist is an error" '[ $? -eq 1 ] && says "none/net.int8"'
fits timeout 60 build/39_pretrain
check "pretraining layer by layer: errors fall, accuracy with few labels rises" \
    '[ $? -eq 0 ] && [ "$(grep -c "^stage [012].* -> 0\.[0-2]" "$tmp/out")" = 3 ] &&
        awk "/^ *200 / { n += \$4 > \$2 } /^ *4000 / { n += \$4 > \$2 - 0.3 } END { exit n != 2 }" "$tmp/out"'
# Models of the Llama family in files as published: the scores of transformers; fields and files that are refused.
for kind in llama qwen2 mistral; do
    build/llama_files "$tmp/$kind" $kind
    build/41_llama "$tmp/$kind" --ids "7 30 2 7 449 0 100 7" --length 0 --top 450 >"$tmp/out" 2>&1
    check "$kind: the scores of transformers" '[ $? -eq 0 ] && awk -v kind=$kind "
        NR == FNR { if (\$1 == kind) { want[\$2, \$3] = \$4; n++ } next }
        /^after/ { at = \$3 + 0 }
        / %/ && (at, \$1) in want { d = want[at, \$1] - \$2; bad += !(d * d < 1e-8); found++ }
        END { exit bad || n != 24 || found != n }" tests/llama_golden.txt "$tmp/out"'
done
# Written token by token, then read as a prompt in blocks: after each token the same one is the likeliest.
build/41_llama "$tmp/qwen2" --ids 7 --length 60 --temperature 0 >"$tmp/written" 2>&1
ids=$(awk 'NF == 0 { exit } { print }' "$tmp/written")
build/41_llama "$tmp/qwen2" --ids "$ids" --length 0 --top 1 >"$tmp/out" 2>&1
check "a prompt that is read in blocks is followed by what was written token by token" \
    '[ $? -eq 0 ] && [ $(echo $ids | wc -w) -gt 33 ] && awk -v ids="$(echo $ids)" "
        BEGIN { n = split(ids, id, \" \") } / %/ && k + 2 <= n { k++; bad += \$1 != id[k + 1] }
        END { exit bad || k != n - 1 }" "$tmp/out"'
cp tests/bpe/vocab.json tests/bpe/merges.txt "$tmp/llama"
fits timeout 60 build/41_llama "$tmp/llama" --prompt "The gradients" --length 12
check "a text by a model of the Llama family" \
    '[ $? -eq 0 ] && says "^The gradients" && says "^6 tokens read, .*; 12 wr"'
fits build/41_llama "$tmp/llama" --ids "51 71" --length 0
check "the likeliest tokens, with their texts" \
    '[ "$(grep -c " % *\"" "$tmp/out")" = 10 ] && says "^after token 1, which is 71"'
llama() { # EDIT ARGUMENTS...: runs with an edited config.json
    edit=$1; shift
    build/llama_files "$tmp/llama" llama && sed -i "$edit" "$tmp/llama/config.json"
    build/41_llama "$tmp/llama" "$@" >"$tmp/out" 2>&1
}
llama 's/"eos_token_id": .*/"eos_token_id": [3, 355]/' --ids "7 30 2 7" --length 9 --temperature 0
check "a token that ends a text" '[ $? -eq 0 ] && says "; 0 written"'
llama s/x/x/ --prompt "" --length 3
check "a text without a first token is an error" '[ $? -eq 1 ] && says "no token, and config.json has no bos_token_id"'
for wrong in "1 x=--ids: x: expected" "-1=--ids: -1: expected" "1 450=token 1 is 450; the model has the tokens 0 to 449"
do
    llama s/x/x/ --ids "${wrong%%=*}" --length 9
    check "--ids ${wrong%%=*} is an error" '[ $? -eq 1 ] && says "^error: ${wrong#*=}"'
done
while IFS='=' read -r edit message; do
    llama "$edit" --ids "1 2" --length 0
    check "config.json after $edit is refused" '[ $? -eq 1 ] && says "^error: $tmp/llama/$message"'
done <<'T'
s/"llama"/"phi"/=config.json: model_type is "phi"; supported: "llama", "qwen2", "mistral"
s/"silu"/"gelu"/=config.json: hidden_act is "gelu"; supported: "silu"
s/null/{"type": "linear"}/=config.json: rope_scaling is {"type": "linear"}; supported: null
s/"rope_scaling"/"partial_rotary_factor": 0.5, "x"/=config.json: partial_rotary_factor is 0.5; supported: 1
s/"rope_scaling": null/"quantization_config": {"bits": 4}/=config.json: quantization_config is {"bits": 4}
s/"hidden_size"/"size"/=config.json: hidden_size is missing; supported: a whole number
s/"vocab_size": 450/"vocab_size": 1e99/=config.json: vocab_size is 1e99; supported: a whole number
s/"num_key_value_heads": 2/"num_key_value_heads": 3/=config.json: num_key_value_heads is 3; supported: a divisor
s/"hidden_size": 32/"hidden_size": 36/=config.json: hidden_size is 36; supported: heads of an even size
s/: false/: maybe/=config.json: tie_word_embeddings is maybe; supported: true or false
s/1e-05/0/=config.json: rms_norm_eps is 0; supported: a number above 1e-30
s/1e-05/1e-300/=config.json: rms_norm_eps is 1e-300; supported: a number above 1e-30
s/"rope_scaling"/"rope_theta": 1e-200, "x"/=config.json: rope_theta is 1e-200; supported: a number above 1e-30
s/\[2, 447\]/[2, "x"]/=config.json: eos_token_id is \[2, "x"\]; supported: ids
s/"max_position_embeddings": 64/"max_position_embeddings": 1/=config.json: max_position_embeddings is 1; the prompt's 2
$d=config.json: not a whole JSON object
T
llama 's/"num_hidden_layers": 2/"num_hidden_layers": 3/' --ids 1 --length 9
check "a parameter that the file lacks is an error" \
    '[ $? -eq 1 ] && says "llama/model.safetensors.*: no tensor .model.layers.2.input_layernorm.weight"'
llama 's/"intermediate_size": 48/"intermediate_size": 40/' --ids 1 --length 9
check "a parameter of another shape is an error" '[ $? -eq 1 ] && says "gate_proj.weight. is 48x32.* expects 40x32"'
# Sizes that the files do not have are refused before memory is taken for them: 2 GB of addresses are enough.
while IFS='=' read -r edit message; do
    (ulimit -v 2000000; llama "$edit" --ids 1 --length 9 --threads 1; exit $?)
    check "config.json after $edit is refused" '[ $? -eq 1 ] && says "^error: .*: .*$message"'
done <<'T'
s/"vocab_size": 450/"vocab_size": 16777216/="model.embed_tokens.weight" is 450x32, config.json expects 16777216x32
s/"hidden_size": 32/"hidden_size": 16777216, "head_dim": 8/=is 450x32, config.json expects 450x16777216
s/"num_a.*": 4, "num.*": 2/"num_attention_heads": 16777216, "head_dim": 1024/=q_proj.* expects 17179869184x32
s/"intermediate_size": 48/"intermediate_size": 16777216/="model.layers.0.mlp.gate_proj.* expects 16777216x32
s/"num_hidden_layers": 2/"num_hidden_layers": 1000/=no tensor "model.layers.2.input_layernorm.weight", which config
T
build/41_llama "$tmp/mistral" --ids "7 30" --length 15 >"$tmp/out" 2>&1
check "more than a sliding window is an error" \
    '[ $? -eq 1 ] && says "sliding_window is 16; .* 2 tokens and --length 15"'
sed -i /1.mlp.up_proj/d "$tmp/mistral/model.safetensors.index.json"
build/41_llama "$tmp/mistral" --ids 7 --length 9 >"$tmp/out" 2>&1
check "a parameter that the index lacks is an error" \
    '[ $? -eq 1 ] && says "index.json: .* no file .*1.mlp.up_proj.weight"'
build/llama_files "$tmp/mistral" mistral && rm "$tmp/mistral/model-00002-of-00002.safetensors"
build/41_llama "$tmp/mistral" --ids 7 --length 9 >"$tmp/out" 2>&1
check "a missing file of several is an error" '[ $? -eq 1 ] && says "mistral/model-00002-of-00002.safetensors"'
rm "$tmp/llama/model.safetensors"
build/41_llama "$tmp/llama" --ids 7 --length 9 >"$tmp/out" 2>&1
check "a missing file of parameters is an error" '[ $? -eq 1 ] && says "llama/model.safetensors"'
build/41_llama "$tmp/qwen2" --prompt x >"$tmp/out" 2>&1
check "a text without a tokenizer is an error" '[ $? -eq 1 ] && says "qwen2/vocab.json: cannot be opened; .* --ids"'
build/41_llama "$tmp/none" --ids 7 --length 9 >"$tmp/out" 2>&1
check "a missing folder of a model is an error" '[ $? -eq 1 ] && says "none/config.json: cannot be opened"'
build/41_llama "$tmp/qwen2" >"$tmp/out" 2>&1
check "neither a text nor tokens is an error" '[ $? -eq 2 ] && says "one FOLDER, and --prompt or --ids"'
gpt2="build/11_gpt2_cpu --layers 2 --width 32 --heads 4 --context 32 --batch 4 --lr 0.003"
fits timeout 60 $gpt2 --bpe tests/bpe --tokens README.md --steps 40 --prompt "The gradients" --check
check "GPT-2 on the CPU learns, and writes with a cache what a whole pass writes" 'says "^CPU, f32: " &&
    says "^The gradients" && says "scores differ by [0-9.]*e-0[5-9] at most" &&
    awk "/^step 1 / { a = \$4 } /^step 40 / { b = \$4 } END { exit !(a > 6 && b < a - 0.3) }" "$tmp/out"'
one=$($gpt2 --vocabulary 256 --steps 0 --prompt x --seed 3 | head -n 2)
two=$($gpt2 --vocabulary 256 --steps 0 --prompt x --seed 3 --length 99 | head -n 2)
check "the same text with the same seed, up to the context's end" '[ -n "$one" ] && [ "$one" = "$two" ]'
two=$($gpt2 --vocabulary 256 --steps 0 --prompt x --seed 4 | head -n 2)
check "another text with another seed" '[ "$one" != "$two" ]'
one=$($gpt2 --vocabulary 256 --steps 0 --prompt x --temperature 0 | head -n 2)
two=$($gpt2 --vocabulary 256 --steps 0 --prompt x --top-k 1 | head -n 2)
check "temperature 0 is the likeliest token, as top-k 1 is" '[ -n "$one" ] && [ "$one" = "$two" ]'
$gpt2 --steps 0 --prompt x --bpe "$tmp" >"$tmp/out" 2>&1
check "a tokenizer that is not there is an error" '[ $? -eq 1 ] && says "vocab.json: cannot be opened"'
$gpt2 --steps 0 --vocabulary 256 --prompt "$(seq -s , 99)" >"$tmp/out" 2>&1
check "a prompt longer than the context is an error" '[ $? -eq 1 ] && says "prompt: 287 tokens; expected 1 to 32"'
head -c 200 /dev/zero | tr '\0' '\377' >"$tmp/tokens.bin"
$gpt2 --vocabulary 256 --tokens "$tmp/tokens.bin" >"$tmp/out" 2>&1
check "a token above the vocabulary is an error" '[ $? -eq 1 ] && says "token 0 is 65535; the model has 256 tokens"'
$gpt2 --vocabulary 100 >"$tmp/out" 2>&1
check "a vocabulary below the text's is an error" '[ $? -eq 1 ] && says "100 tokens; the text has up to 256"'
fits timeout 60 build/20_lbfgs
check "L-BFGS on ranks finds the weights of one rank; a slow worker costs little" \
    '[ $? -eq 0 ] && says "step 15  loss 0.4131487" && says "^portions: 4"'
if [ -z "$lack" ]; then
    HPML_RUN=mpi timeout 60 "$mpiexec" $mpi_options -n 3 build/20_lbfgs_mpi >"$tmp/out" 2>&1
    check "L-BFGS under mpiexec" 'says "step 15  loss 0.4131487"'
fi
fits timeout 60 build/32_graph
check "a dataflow graph: pruned, cut, on a server, fused, with a branch and a loop in a stream" '[ $? -eq 0 ] &&
    says "^output = 9; executed: a b c add1 mul1 output; 5 tensors sent in 5 messages$" &&
    says "S is 0 off a serial loop.s; 15 messages$" && says "5 passes; fused 1, the same bits$" &&
    says "in 2 of 5 runs; yes ran 2 times, no 3;" && says "144 iterations in all; 4 epochs delivered, 0 of them wrong"'
build/32_graph add2 >"$tmp/out" 2>&1
check "another node of it, which needs other nodes" \
    '[ $? -eq 0 ] && says "^add2 = 7; executed: c d add2; 2 tensors sent in 2 messages$"'
HPML_RUN=serial timeout 60 build/32_graph >"$tmp/out" 2>&1
check "on one rank nothing is sent" '[ $? -eq 0 ] && says "; 0 tensors sent in 0 messages$"'
one=$(HPML_RUN=clock:3 timeout 60 build/32_graph) && two=$(HPML_RUN=clock:3 timeout 60 build/32_graph)
check "in virtual time epochs are delivered at the same time twice" '[ -n "$one" ] && [ "$one" = "$two" ]'
build/32_graph add3 >"$tmp/out" 2>&1
check "a node that the graph does not have is an error" '[ $? -eq 2 ] && says "NODE is one of a b c d"'
fits timeout 60 build/42_place
check "ops on the CPU or the GPU: the cheapest of all placements, as predicted" '[ $? -eq 0 ] &&
    says "^   8 .*  none$" && says "^ 512 .*  scale matmul1 relu1 matmul2 add relu2 sum$" &&
    says "best of 512 placements"'
build/42_place 200 >"$tmp/out" 2>&1
check "a placement on both" '[ $? -eq 0 ] && says "^ 200  *72.91  *61.57  *60.21  matmul1 relu1 matmul2 add relu2 sum$"'
build/42_place 0 >"$tmp/out" 2>&1
check "a net of no rows is an error" '[ $? -eq 2 ] && says "ROWS: 1 to 4096"'
fits timeout 60 build/33_map_reduce
check "word count and gradient: bytes without and with a combiner; a lost worker" '[ $? -eq 0 ] &&
    says "^gradient: 460896 bytes, combined 2400; pairs: 200.0 times fewer$" &&
    says "^word count: .* 4.0 times fewer$" && says "lost: 1; 40 shards made, 4 of them again; the same bits$" &&
    says "^1 of 4 ranks lost: rank 3: worker 3 fails"'
for run in serial clock:7; do HPML_RUN=$run timeout 60 build/33_map_reduce 500 || echo no; done >"$tmp/out" 2>&1
check "the same bits on 1 and 7 ranks" '[ "$(grep -c "the same bits$" "$tmp/out")" = 4 ] && ! says "^no"'
build/33_map_reduce 0 >"$tmp/out" 2>&1
check "shards without words are an error" '[ $? -eq 2 ] && says "WORDS: of each shard, 1 to 1000000"'
HPML_RUN=threads:65 build/33_map_reduce 9 >"$tmp/out" 2>&1
check "more ranks than its tables have entries are an error" \
    '[ $? -eq 1 ] && says "65 ranks: map_reduce.h is for up to 64"'
fits timeout 60 build/34_supersteps
check "supersteps on 1 to 4 ranks; levels of consistency" '[ $? -eq 0 ] && says "^  consistency full *0 *0 *0$" &&
    [ "$(grep -c "PageRank: [0-9]* supersteps; mail [0-9]*, .* off" "$tmp/out")" = 4 ] &&
    [ "$(grep -c largest "$tmp/out")" = 4 ]'
build/34_supersteps 5 >"$tmp/out" 2>&1
check "too few vertices are an error" '[ $? -eq 2 ] && says "10 to 1000000"'
if [ -z "$lack" ]; then
    HPML_RUN=mpi timeout 60 "$mpiexec" $mpi_options -n 2 build/32_graph_mpi >"$tmp/out" 2>&1
    check "a dataflow graph under mpiexec" \
        '[ $? -eq 0 ] && says "5 tensors sent in 5 messages" && says "0 of them wrong"'
    HPML_RUN=mpi timeout 60 "$mpiexec" $mpi_options -n 3 build/33_map_reduce_mpi 500 >"$tmp/out" 2>&1
    check "MapReduce and a lost worker under mpiexec" \
        '[ $? -ne 124 ] && says "lost: 1; 42 shards made, 6 of them again; the same"'
    HPML_RUN=mpi timeout 60 "$mpiexec" $mpi_options -n 2 build/34_supersteps_mpi >"$tmp/out" 2>&1
    check "supersteps under mpiexec" '[ $? -eq 0 ] && says "^ranks: 2 (mpi)" && says "largest"'
fi
build/08_simulate --layers /nonexistent >"$tmp/out" 2>&1
check "a missing file of layers is an error" '[ $? -ne 0 ] && grep -q nonexistent "$tmp/out"'
fits build/02_mnist --compare --samples 640 --epochs 1 --model mlp --out "$files"
check "the demo says what it has drawn and what its table shows" \
    '[ "$(grep -c "<polyline" "$files/loss.svg")" = 3 ] && says "loss.svg" && says "trace.json" &&
        says "1-bit gradients"'
fits build/02_mnist --workers 2 --samples 640 --epochs 2 --model linear --steps-table 3 --out "$files"
fits build/03_charlm --steps 2 --batch 2 --length 300 hpml.h
fits build/05_allreduce --ranks 2 --max 4096
fits build/17_plans strategy=local,period=10 strategy=gossip,topology=pairs
fits build/08_simulate --out "$files" --ranks 64
for program in 01_xor 04_embed_cpp 07_digits 06_onebit_dropin 09_queue 18_own_op; do fits build/$program; done
for program in 02_mnist 03_charlm 05_allreduce 08_simulate 11_gpt2_cpu 13_parameter_server 21_federated \
    31_generate 41_llama; do
    fits build/$program --help
    check "$program --help" 'says "^  --[a-z]* "'
done
[ -z "$HPML_TEST_ALL" ] || fits sh tests/doctor.sh # compiles hpml.h
# The scripts that this and the other tests rest on.
printf '#!/bin/sh\nfor program; do :; done\n"$program"; "$program"\n' >"$tmp/alone" # starts each rank alone
chmod +x "$tmp/alone"
if [ -z "$lack" ]; then
    MPIEXEC=$tmp/alone sh -c '. tests/mpi.sh; mpi_lacks "$1"' sh "$tmp" >"$tmp/out" 2>&1
    check "an mpiexec that starts each rank alone is named" 'says alone'
fi
mkdir -p "$tmp/runner/tests"
cp tests/run.sh "$tmp/runner/tests" && cp build/terminal "$tmp/runner"
cat >"$tmp/runner/slow.sh" <<'S'
sleep 2
echo "skip slow_case (no GPU)"
echo "skip 2 checks (no clang)"
echo "3 passed, 0 failed, 3 skipped"
S
echo 'echo "SKIP: no mpicc"; exit 77' >"$tmp/runner/absent.sh"
echo 'echo reason; exit 3' >"$tmp/runner/bad.sh"
(cd "$tmp/runner" && ./terminal 80 sh tests/run.sh ./slow.sh ./absent.sh ./bad.sh) >"$tmp/out" 2>&1
check "the test runner shows what is running, counts skips by reason and reports a failure" '[ $? -eq 1 ] &&
    says "2 of 3 done; running: slow.sh [12] s" && says "^skipped: 2 x no clang" && says "^skipped: 1 x no mpicc" &&
    says "bad.sh: failed, exit 3" && says "^3 passed, 1 failed, 4 skipped"'
echo "$passed passed, $failed failed, $skipped skipped"
[ $failed -eq 0 ]

#!/bin/sh
# Speed and memory of many models beside PyTorch, eager and compiled, onnxruntime for predictions and llm.c for GPT-2.
# The fastest peer counts; medians of alternating rounds. Rows go to build/bench.jsonl, with the figures of all peers.
#     sh tests/bench/bench_models.sh [MODEL...]    MODEL: a name of `build/bench_models list`, or growth; none: all
# In the environment: ROUNDS (3), TURN (1: seconds of a measurement), THREADS ("1 2", and 4 8 16 where there are so many
# cores), COMPILE (90: seconds that the first compiled step may take; 0: eager only), LLMC (the folder with llm.c's
# source), CPU=avx2 (holds hpml and PyTorch to that instruction set). What is compiled is kept in build/inductor; after
# 35 minutes COMPILE becomes 10, enough to load it, so that all rows take less than an hour; a further run has the rest.
. tests/bench/rows.sh
bench=models rounds=${ROUNDS:-3} began=$(date +%s) failed=0 missing=
tmp=$(mktemp -d)
trap '' PIPE
trap 'rm -rf "$tmp"' EXIT
[ -z "$CPU" ] || export ATEN_CPU_CAPABILITY="$CPU" ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2
command -v python3 >/dev/null || missing="python3 is not installed"
if [ -n "$LLMC" ]; then # with the flags of its Makefile
    ${CC:-cc} -Ofast -march=native -fopenmp -DOMP -w -I"$LLMC" tests/bench/bench_llmc.c -o build/bench_llmc -lm ||
        exit 1
    export LLMC=build/bench_llmc
fi

value() { awk -v key="$2" '{ for (i = 1; i < NF; i += 2) if ($i == key) print $(i + 1) }' "$tmp/$1" | median; }

measure() { # MODEL OPTIMIZER BATCH train|predict THREADS: ours and the peers' program take turns
    : >"$tmp/ours"; : >"$tmp/theirs"; : >"$tmp/errors"
    if [ -z "$missing" ]; then
        rm -f "$tmp/ask" "$tmp/answer"
        mkfifo "$tmp/ask" "$tmp/answer" || exit 1
        timeout 900 python3 tests/bench/bench_models.py "$@" <"$tmp/ask" >"$tmp/answer" 2>"$tmp/errors" &
        exec 4>"$tmp/ask" 5<"$tmp/answer"
    fi
    for round in $(seq "$rounds"); do
        timeout 300 build/bench_models "$1" "$3" "$4" "$5" "$CPU" >>"$tmp/ours" || return 1
        [ -n "$missing" ] || { echo go >&4; read -r answer <&5 && echo "$answer" >>"$tmp/theirs"; } 2>/dev/null
    done
}

report() { # MODEL OPTIMIZER BATCH train|predict THREADS: the row of what was measured
    ours=$(value ours hpml) best= peer=- theirs=null ratio=null json=
    for key in gflops of_peak first_step_ms mb; do json="$json\"$key\": $(value ours $key), "; done
    for key in pytorch compiled onnxruntime llm.c; do
        speed=$(value theirs $key)
        json="$json\"$key\": ${speed:-null}, "
        [ -z "$speed" ] || best="$best$speed $key\n"
    done
    best=$(printf "$best" | sort -gr | head -n 1) memory=$(value theirs mb)
    if [ -n "$best" ]; then
        [ "$(value ours params)" = "$(value theirs params)" ] || {
            echo "$1: $(value ours params) parameters, of its peer $(value theirs params): no row"
            return 1
        }
        theirs=${best% *} peer=${best#* } ratio=$(ratio "$ours" "$theirs")
    fi
    why=$(grep -E '^(PyTorch|pytorch|compiled|onnxruntime|llm.c): ' "$tmp/errors" | sort -u)
    why=$(echo "${missing:-$why}" | tr -d '"\\\t' | tr '\n' ' ')
    row "$1 $3 $4 ${5}t${CPU:+ $CPU}" samples/s "$ours" "$peer" "$theirs" "$ratio" \
        "$(printf '%8s %8s %8s  %s' "$(value ours of_peak)" "$(value ours mb)" "${memory:-null}" "$why")" \
        "$json\"peer_mb\": ${memory:-null}, \"why\": \"$why\", "
}

growth() {
    build/bench_models growth | while IFS='|' read -r case unit cost first ratio; do
        row "$case" "$unit" "$cost" "the smallest" "$first" "$ratio"
    done
    for round in $(seq "$rounds"); do timeout 100 build/bench_comm workers mlp 64; done >"$tmp/ours"
    one=$(value ours one) sixteen=$(value ours sixteen)
    row "16 workers, MLP of batch 64 each" samples/s "$sixteen" "1 worker" "$one" "$(ratio "$sixteen" "$one")"
}

printf '%-44s %12s %-10s %-22s %12s %7s%8s %8s %8s\n' case hpml unit peer peer_value ratio of_peak MB peer_MB
build/bench_models list >"$tmp/list"
models=${*:-$(cut -d ' ' -f 1 "$tmp/list" | uniq) growth}
for threads in ${THREADS:-1 2 4 8 16}; do
    [ "$threads" -le 2 ] || [ "$threads" -le "$(nproc)" ] || continue
    for model in $models; do
        [ "$model" != growth ] || continue
        grep "^$model " "$tmp/list" >"$tmp/rows" || { echo "no model $model"; failed=1; }
        while read -r line <&3; do
            [ "$(($(date +%s) - began))" -lt 2100 ] || export COMPILE=10
            measure $line "$threads" && report $line "$threads" || failed=1
            exec 4>&- 5<&-
            wait
        done 3<"$tmp/rows"
    done
done
case " $models " in *growth*) growth ;; esac
exit $failed

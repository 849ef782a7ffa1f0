#!/bin/sh
# The CUDA backend on this machine's GPU: all tests, then a few of each kind under compute-sanitizer, which is slow.
. tests/gpu.sh
timeout 240 build/test_gpu >build/log/test_gpu.all 2>&1
code=$?
grep -v '^[0-9]* passed' build/log/test_gpu.all
counts=$(grep -E '^[0-9]+ passed, [0-9]+ failed, [0-9]+ skipped$' build/log/test_gpu.all | tail -n 1)
rest=${counts#*, } passed=${counts%% *} failed=${rest%% *} last=${counts##*, }
passed=${passed:-0} failed=${failed:-0} skipped=${last%% *}
skipped=${skipped:-0}
[ $code -ne 77 ] || { echo "FAIL test_gpu: there is a GPU, but CUDA does not find it"; failed=$((failed + 1)); }
[ -n "$counts" ] || { echo "FAIL test_gpu: exit $code before its end"; failed=$((failed + 1)); }
tool=$(command -v compute-sanitizer || command -v "${CUDA_HOME:-/usr/local/cuda}/bin/compute-sanitizer")
for check in "memcheck embedding" "memcheck attention_in_halves" "memcheck half_copies" "memcheck counts" "memcheck losses" \
             "racecheck masks" "racecheck embedding" "racecheck counts" "racecheck half_copies"; do
    if [ -z "$tool" ]; then echo "skip $check (no compute-sanitizer)"; skipped=$((skipped + 1)); continue; fi
    out=$(timeout 25 "$tool" --tool "${check% *}" --error-exitcode 9 build/test_gpu --filter "${check#* }" 2>&1)
    code=$?
    case $code in
    0) echo "ok $check"; passed=$((passed + 1)) ;;
    124) echo "skip $check (not done in 25 s)"; skipped=$((skipped + 1)) ;;
    *) echo "FAIL $check: exit $code"; echo "$out" | head -n 30; failed=$((failed + 1)) ;;
    esac
done
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ]

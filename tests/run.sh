#!/bin/sh
# Runs test programs one after another, with a time limit, and adds up their counts. Arguments: programs. A program prints
# "N passed, N failed, N skipped" at its end; one that prints no counts is one test: exit 0 passed, 77 skipped, else failed.
passed=0 failed=0 skipped=0
mkdir -p build/log
for program in "$@"; do
    case $program in *.sh) set -- sh "$program" ;; *) set -- "$program" ;; esac
    name=$(basename "$program")
    timeout "${HPML_TEST_SECONDS:-240}" "$@" >"build/log/$name.log" 2>&1 </dev/null
    code=$?
    counts=$(grep -E '^[0-9]+ passed, [0-9]+ failed, [0-9]+ skipped$' "build/log/$name.log" | tail -n 1)
    if [ -n "$counts" ]; then
        set -- $(echo "$counts" | tr -dc '0-9 ')
        passed=$((passed + $1)) failed=$((failed + $2)) skipped=$((skipped + $3))
        [ $code -eq 0 ] || [ $code -eq 77 ] || [ "$2" -gt 0 ] || failed=$((failed + 1))
    elif [ $code -eq 0 ]; then passed=$((passed + 1)) counts=passed
    elif [ $code -eq 77 ]; then skipped=$((skipped + 1)) counts="skipped: $(tail -n 1 "build/log/$name.log")"
    else failed=$((failed + 1)) counts="failed, exit $code"
    fi
    echo "$name: $counts"
    [ $code -eq 0 ] || [ $code -eq 77 ] || { grep -v '^ok ' "build/log/$name.log" | tail -n 40; }
done
echo "$passed passed, $failed failed, $skipped skipped"
[ $failed -eq 0 ]

#!/bin/sh
# Every exercise: starter.c is the solution without its regions and fails with "not implemented yet"; the solution gets
# all points; the README names difficulty, minutes and the checker's messages. With HPML_TEST_ALL also the wrong
# solutions in tests/exercises/: each fails with its message. HPML_EXERCISE=05: this exercise alone.
tmp=$(mktemp -d) passed=0 failed=0 here=examples/exercises
trap 'rm -rf "$tmp"' EXIT
check() { # NAME CONDITION: of the output in $tmp/out
    if eval "$2"; then passed=$((passed + 1))
    else failed=$((failed + 1)); echo "FAIL $1:"; head -n 12 "$tmp/out"; fi
}
says() { tr -s ' \n' ' ' <"$tmp/out" | grep -qF -- "$1"; } # TEXT: in the output, wherever lines break
grade() { # FILE OPTION...: checks it as exercise $number
    file=$1
    shift
    timeout 300 sh $here/check.sh "$number" "$file" "$@" >"$tmp/out" 2>&1
}
for folder in $here/${HPML_EXERCISE:-[0-9]*}*/; do
    name=$(basename "$folder") number=$(basename "${folder%%_*}")
    wrong=tests/exercises/$name.wrong
    solution=$(echo "${folder}"solution.c*) starter=$(echo "${folder}"starter.c*) # .c or .cu
    awk -f $here/cut.awk "$solution" | diff - "$starter" >"$tmp/out" 2>&1
    check "$name: starter.c is the solution, cut" '[ ! -s "$tmp/out" ]'
    grade "$starter" --json "$tmp/json"
    check "$name: the starter is not implemented yet" '[ $? -eq 1 ] && says "not implemented yet" && ! says warning'
    check "$name: the starter has no points" 'tail -n 1 "$tmp/json" | grep -q "\"score\": 0}"'
    grade "$solution"
    check "$name: the solution gets all points" '[ $? -eq 0 ] && says " ok" && ! says warning'
    cat "${folder}README.md" >"$tmp/out"
    check "$name: difficulty and minutes" 'says "Difficulty" && says "minutes"'
    mistakes=$(grep -c '^# ' "$wrong")
    check "$name: three wrong solutions" '[ "$mistakes" -ge 3 ]'
    check "$name: three messages in the README" '[ "$(sed -n "s/^! //p" "$wrong" | while read -r text; do
        says "$text" && echo yes; done | wc -l)" -ge 3 ]'
    [ -n "$HPML_TEST_ALL" ] || continue
    for seed in 2 3; do
        grade "$solution" --seed $seed
        check "$name: the solution gets all points with seed $seed" '[ $? -eq 0 ]'
    done
    for mistake in $(seq "$mistakes"); do
        awk -v number="$mistake" -f tests/exercises/wrong.awk "$wrong" "$solution" >"$tmp/wrong.c"
        text=$(awk -v n="$mistake" '/^# / { k++ } k == n && sub(/^! /, "")' "$wrong")
        grade "$tmp/wrong.c"
        check "$name: mistake $mistake says $text" '[ $? -eq 1 ] && [ -n "$text" ] && says "$text"'
    done
done
number=01 solution=$here/01_descent/solution.c
grade $solution --seed x
check "a seed that is no number" '[ $? -eq 2 ] && says "usage:"'
grade $solution --case "the largest rate"
check "one case" '[ $? -eq 0 ] && [ "$(cat "$tmp/out")" = right ]'
sed 's/^    return 2 .*/    return 7;/' $solution >"$tmp/seven.c"
for seed in 1 1 2; do
    grade "$tmp/seven.c" --seed $seed --json "$tmp/json"
    sed 1d "$tmp/out"
done >"$tmp/all"
cp "$tmp/all" "$tmp/out"
check "the seed decides the numbers" \
    'says "the rate 7 is not the bound" && [ "$(grep -c WRONG "$tmp/out")" -ge 3 ] && [ "$(sort "$tmp/out" | uniq -c |
        grep -c " 2 .*the rate 7 is not")" = 1 ]'
cp "$tmp/json" "$tmp/out"
check "JSON" 'says "\"name\": \"the largest rate\", \"score\": 0, \"max_score\": 20, \"output\": \"the rate 7"'
if [ -n "$HPML_TEST_ALL" ]; then
    sed 's/^    return 2 .*/    for (;;) {}/' $solution >"$tmp/loop.c"
    CFLAGS=-DGRADE_CPU_SECONDS=1 grade "$tmp/loop.c"
    check "a loop without an end" '[ $? -eq 1 ] && says "no end after 1 s"'
    number=05
    grade $here/05_ring/solution.c --draw "$tmp/picture.svg"
    check "a picture of the messages" \
        '[ $? -eq 0 ] && says "24 messages" && tail -n 1 "$tmp/picture.svg" | grep -q "</svg>"'
fi
echo "$passed passed, $failed failed, 0 skipped"
[ $failed -eq 0 ]

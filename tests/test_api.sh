#!/bin/sh
# What the header promises about itself: index, section lengths, line lengths, budget, ASCII; its example and the README's run.
tmp=$(mktemp -d) passed=0 failed=0
trap 'rm -rf "$tmp"' EXIT
check() { if [ -z "$2" ]; then passed=$((passed + 1)); else failed=$((failed + 1)); echo "FAIL $1:"; echo "$2" | head -n 10; fi; }
grep '^// >>' hpml.h | sed 's|^// >>||' >"$tmp/tags"
sed -n '/^\/\/ INDEX/,/^#ifndef/p' hpml.h | grep '^//     ' | sed 's|^//     ||' >"$tmp/index"
check "the index is not the list of sections" "$(diff "$tmp/index" "$tmp/tags")"
check "sections of more than 400 lines" "$(awk '/^\/\/ >>/ { if (NR - at > 400 && tag) print tag, NR - at; at = NR; tag = $2 }' hpml.h)"
check "functions of more than 60 lines" "$(awk '/^{/ { start = NR } /^}/ { if (start && NR - start > 62) print FILENAME ":" start ": " NR - start; start = 0 }' hpml.h)"
check "characters outside ASCII" "$(LC_ALL=C grep -n '[^ -~	]' hpml.h)"
run() { # says what goes wrong when the program in $1 is compiled and run
    ${CC:-cc} -O1 -I. "$1" -o "$tmp/program" -lm -lpthread 2>&1 || { echo "does not compile"; return; }
    "$tmp/program" >"$tmp/out" 2>&1 || { echo "exit status $?"; cat "$tmp/out"; }
}
sed -n '/^\/\/ QUICK EXAMPLE/,/^\/\/ hpml.h DOES NOT/p' hpml.h | grep '^//     ' | sed 's|^//     ||' >"$tmp/example.c"
check "the example in the header" "$(run "$tmp/example.c")"
awk '/^```c$/ { on = 1; n++; next } /^```$/ { on = 0 } on { print > ("'"$tmp"'/readme" n ".c") }' README.md
for f in "$tmp"/readme*.c; do check "a code block of the README" "$(run "$f")"; done
echo "$passed passed, $failed failed, 0 skipped"
[ $failed -eq 0 ]

#!/bin/sh
# What a script can check of how all files are written: lines of at most 120 columns; no words that a reader who does
# not know the code cannot resolve; tests/outside, which shows what users add, uses nothing private and is short; each
# test is in the list of build.ninja.
tmp=$(mktemp -d) passed=0 failed=0
trap 'rm -rf "$tmp"' EXIT
check() { # NAME TEXT: passes without a text
    if [ -z "$2" ]; then passed=$((passed + 1))
    else failed=$((failed + 1)); echo "FAIL $1:"; echo "$2" | head -n "${3:-10}"; fi
}
check "lines of more than 120 columns" \
    "$(find build.ninja examples tests -type f ! -name '*.safetensors' -exec \
        awk 'length > 120 { print FILENAME ":" FNR ": " length }' {} +)"

# prose FILE: prints the comments and strings of C and C++, else all lines; each after its line's number. A comment of
# several lines is one line, so that phrases are found.
prose() {
    case $1 in *.c | *.h | *.cc | *.cpp | *.cu | *.cuh) ;; *) awk '{ print FNR ": " $0 }' "$1"; return ;; esac
    awk '
        function flush() { if (text != "") print first ": " text; text = "" }
        function add(s) { if (text == "") first = FNR; text = text " " s }
        { rest = $0; sub(/^[ \t]+/, "", rest); if (!inside && rest !~ /^\/\//) flush() }
        {
            while (rest != "") {
                if (inside) {
                    at = index(rest, "*/")
                    add(at ? substr(rest, 1, at - 1) : rest)
                    if (!at) next
                    rest = substr(rest, at + 2); inside = 0; flush()
                } else if (!match(rest, /\/\*|\/\/|"|\047/)) next
                else {
                    mark = substr(rest, RSTART, RLENGTH); rest = substr(rest, RSTART + RLENGTH)
                    if (mark == "/*") inside = 1
                    else if (mark == "//") { add(rest); next }
                    else {
                        match(rest, mark == "\"" ? /^([^"\\]|\\.)*"?/ : /^([^\047\\]|\\.)*\047?/)
                        if (mark == "\"") { add(substr(rest, 1, RLENGTH)); flush() }
                        rest = substr(rest, RLENGTH + 1)
                    }
                }
            }
        }
        END { flush() }' "$1"
}
words='somebody|nobody|aboard|rode|so +far|whoever|those +who|told'
for file in hpml.h hpml_comm.h hpml_cuda.cuh README.md build.ninja .ci/run $(find examples tests -type f | sort); do
    [ "$file" != tests/test_style.sh ] || continue # names the words
    prose "$file" | awk -v words="(^|[^a-z0-9_])($words)([^a-z0-9_]|\$)" '{
        text = tolower($0)
        while (match(text, words)) {
            from = RSTART > 50 ? RSTART - 50 : 1
            print $1 " ..." substr(text, from, RSTART - from + RLENGTH + 40)
            text = substr(text, RSTART + RLENGTH - 1)
        } }' >"$tmp/found"
    check "$file: $(wc -l <"$tmp/found") times one of $words" "$(cat "$tmp/found")" 5
done

for file in $(find tests/outside -type f 2>/dev/null); do
    check "$file: private names" "$(grep -nE 'hpml[icg]_|HPML[ICG]_|private_' "$file")"
    check "$file: 80 lines or more" "$(awk 'END { if (NR >= 80) print NR }' "$file")"
done
awk '/^build test(-more)?: tests/, !/\$$/' build.ninja | tr -s ' ' '\n' >"$tmp/list"
for file in tests/test_*.c tests/test_*.sh tests/emulator/test_*.cc $(find tests/outside -type f); do
    name=$(basename "${file%.*}")
    [ $name != test_gpu ] || continue # for a GPU
    grep -qxE "$file|build/$name|build/(check|race)_${name#test_}" "$tmp/list" || echo "$file"
done >"$tmp/found"
check "tests that ninja test and ninja test-all do not run" "$(cat "$tmp/found")"
echo "$passed passed, $failed failed, 0 skipped"
[ $failed -eq 0 ]

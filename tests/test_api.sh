#!/bin/sh
# What the headers promise about themselves: index and banners, lengths of sections, functions, lines and files, ASCII,
# macros; ctags finds every function. The examples in the headers and the README compile and run (test_cuda.sh has those
# for nvcc).
tmp=$(mktemp -d) passed=0 failed=0 skipped=0
trap 'rm -rf "$tmp"' EXIT
check() {
    if [ -z "$2" ]; then passed=$((passed + 1))
    else failed=$((failed + 1)); echo "FAIL $1:"; echo "$2" | head -n 10; fi
}
wide() { awk 'length > 120 { print FILENAME ":" FNR ": " length }' "$@"; }
# skip N REASON: N checks are left out.
skip() { skipped=$((skipped + $1)); echo "skip $1 checks ($2)"; }
run() { # FILE: prints why the program does not compile or run, if so. The bodies, which compile slowly and include
    # stdio.h, are those that ninja has compiled
    ${CC:-cc} -O0 -DHPMLI_BODY_INCLUDED -DHPML_COMM_BODY -include stdio.h -I. "$1" build/hpml.o build/comm.o \
        -o "$tmp/program" $(cat build/zlib.flags) -lm -lpthread -ldl 2>&1 || { echo "does not compile"; return; }
    (cd "$tmp" && ./program) >"$tmp/out" 2>&1 || { echo "exit status $?"; cat "$tmp/out"; }
}
index() { # FILE: its INDEX has the banners of PARTs and the tags of sections, in their order
    sed -n '/^\/\/ INDEX/,/^#ifndef/p' "$1" >"$tmp/index"
    awk '/^\/\/ INDEX/, /^#ifndef/ { next } /^\/\/ (PART |>>)/ { sub(/>>/, "    "); print }' "$1" >"$tmp/tags"
    grep -E '^// (PART |    )' "$tmp/index" | diff - "$tmp/tags" >"$tmp/diff"
    check "$1: the INDEX (<) is not the list of PARTs and sections (>)" "$(cat "$tmp/diff")"
    check "$1: PARTs without a line of // === above and below" "$(awk '
        /^\/\/ INDEX/, /^#ifndef/ { next }
        part { if ($0 !~ /^\/\/ =+$/) print part; part = "" }
        /^\/\/ PART / { if (above ~ /^\/\/ =+$/) part = $0; else print }
        { above = $0 }' "$1")"
    check "$1: sections api-* come first, apart from the PARTs of the body" "$(awk '
        /^\/\/ PART / { part = $3; parts++; next }
        $2 ~ /^api-/ { if (body) print $2 " comes after " body; interface = part; next }
        { body = $2; if (part == interface) print $2 " is no api-*, but in the same PART or before the first" }
        END { if (parts < 2) print parts + 0 " PARTs" }' "$tmp/tags")"
}
functions() { # FILE: ctags finds each function that is spelled: a head from the first column, then { or { ... }
    awk '
        function found(first) { print first, FNR, head; head = "" }
        /^#/ { head = "" }
        /^[A-Za-z_]/ { head = $0; first = FNR }
        /^[ \t]/ && head { head = head " " $0 }
        { sub(/ *(\/\*.*\*\/)?$/, "", head) } # a comment at the end
        head ~ /^(typedef|struct|enum|union|extern|[A-Z_0-9]+\()/ || head !~ /\)/ { next }
        /^\{/ && head !~ /=$/ { found(first) }
        head ~ /\) *\{.*\}$/ { found(first) }' "$1" >"$tmp/functions"
    grep -oE '^HPML[A-Z]*_[A-Z0-9_]+\(' "$1" | grep -v _PRINTF | sort | uniq -c | sort -rn |
        awk -v file="$1" '{ sub(/\(/, "", $2); n += $1; text = text ", " $2 " " $1 }
            END { print file ": " n + 0 " functions come from macros, whose calls ctags does not find" text }'
    check "$1: public functions without a definition that is spelled" "$(awk -v file="$1" '
        { sub(/\(.*/, ""); name = $NF; sub(/^\*+/, "", name) }
        FILENAME == file && /^HPML_API / { all[name] }
        FILENAME != file { delete all[name] }
        END { for (name in all) print name }' "$1" "$tmp/functions")"
    if [ -z "$ctags" ]; then skip 2 "no universal-ctags"; return; fi
    case $1 in *.cuh) kinds='--language-force=CUDA --cuda-kinds=f' ;; *) kinds=--c-kinds=f ;; esac
    ctags -x $kinds "$1" | awk '{ print $3, $1 }' >"$tmp/found"
    echo "$1: $(wc -l <"$tmp/functions") functions are spelled, ctags finds $(wc -l <"$tmp/found")"
    check "$1: functions that ctags does not find" "$(awk '
        NR == FNR { tag[$1]; next }
        { for (line = $1; line <= $2; line++) if (line in tag) next; print $1 ": " substr($0, index($0, $3), 90) }
        ' "$tmp/found" "$tmp/functions")"
    # HV(name) makes a kernel's name for each instruction set: by .ctags.d ctags lists `name`
    check "$1: functions that ctags finds under another name" "$(awk '
        NR == FNR {
            for (; match($0, /HV\([a-z0-9_]+\)/); $0 = substr($0, RSTART + RLENGTH))
                kernel[substr($0, RSTART + 3, RLENGTH - 4)]
            next
        }
        !($2 in kernel) && $2 !~ /^((load|store)_upto_|hpml[icg]?_|HPML[A-Z]*_[A-Z0-9_]+$)/ { print $1 ": " $2 }
        ' "$1" "$tmp/found")"
}
header() { # FILE LINES
    index "$1"
    functions "$1"
    check "$1: sections of more than 400 lines" "$(awk '
        function section() { if (NR - at > 400 && tag) print tag, NR - at; at = NR; tag = $2 }
        /^\/\/ >>/ { section() } END { section() }' "$1")"
    check "$1: functions of more than 60 lines" "$(awk '/^{/ { start = NR }
        /^}/ { if (start && NR - start > 62) print FILENAME ":" start ": " NR - start; start = 0 }' "$1")"
    check "$1: lines of more than 120 columns" "$(wide "$1")"
    check "$1: more than $2 lines" "$(awk -v most="$2" 'END { if (NR > most) print NR }' "$1")"
    check "$1: characters outside ASCII" "$(LC_ALL=C grep -n '[^ -~	]' "$1")"
    sed -n '/^\/\/ QUICK EXAMPLE/,/DOES NOT/p' "$1" | grep '^//     ' | sed 's|^//     ||' >"$tmp/example.c"
    [ "$1" = hpml_cuda.cuh ] && return # which test_cuda.sh compiles with nvcc
    check "$1: its example" "$(run "$tmp/example.c")"
    printf '#define HPML_IMPLEMENTATION\n#include "%s"\n' "$1" >"$tmp/body.c"
    check "$1: macros of other names that its body leaves behind" "$(${CC:-cc} -E -dD -I. "$tmp/body.c" | awk '
        /^# [0-9]/ { ours = $3 ~ /hpml/ } ours && /^#define/ { sub(/\(.*/, "", $2); left[$2] }
        /^#undef/ { delete left[$2] } END { for (name in left) if (name !~ /^(HPML|hpml)/) print name }')"
}
ctags=
! ctags --version 2>/dev/null | grep -q Universal || ctags=ctags
header hpml.h 24000
header hpml_comm.h 21200
header hpml_cuda.cuh 8000
goals=$(sed -n 's/^default//p' build.ninja)
for f in examples/[0-9]*.c* examples/ladder_*.cu; do
    for goal in $goals; do awk -v "goal=$goal:" '$2 == goal, !/\$$/' build.ninja; done |
        grep -qw "build/$(basename "${f%.*}")" || echo "$f"
done >"$tmp/unbuilt"
check "examples that plain ninja does not build" "$(cat "$tmp/unbuilt")"
names=$(grep -nE '^#define|__global__ .*\(' hpml_cuda.cuh | grep -vE 'hpmlg_k_|#define (HPMLG_|hpmlg_|HPML_CUDA_)')
check "hpml_cuda.cuh: kernels that are not hpmlg_k_*, macros that are not HPMLG_*" "$names"
# hpml_nccl_link_*: what hpml_nccl_attach gives to hpml_comm.h; the others: for backends
find examples tests/outside README.md -type f -exec cat {} + | grep -oE 'hpml_[a-z0-9_]+' | sort -u >"$tmp/shown"
sed -nE '/^HPML_API/s/^[^(]*[ *](hpml_[a-z0-9_]+)\(.*/\1/p' hpml.h hpml_comm.h hpml_cuda.cuh | sort -u |
    grep -vE '^hpml_nccl_link_|^hpml_custom_on_host$' | comm -23 - "$tmp/shown" >"$tmp/unshown"
check "$(wc -l <"$tmp/unshown") public functions that no example calls" "$(cat "$tmp/unshown")"
# hpml_log_stderr, which a program can choose as its log, is the one function that prints; _exit ends forked ranks.
check "functions by which the library would end the program or print" "$(nm -u build/hpml.o build/comm.o |
    grep -E ' (_*(abort|Exit|quick_exit|assert_fail|puts|printf|vprintf|putchar|perror)(_chk)?|exit|stdout)(@|$)')"
check "hpml_log_stderr is not the only function with stderr" "$(grep -n '[^_]stderr' hpml.h hpml_comm.h |
    grep -v 'fprintf(stderr, "%s\\n", text);')"
awk '/^```c$/ { on = 1; n++; next } /^```$/ { on = 0 } on { print > ("'"$tmp"'/readme" n ".c") }' README.md
serial=$(grep -l '"hpml.h"' "$tmp"/readme*.c | head -n 1)
line=$(grep -m 1 '^    hpml_model_save(' README.md) # saves the model that the next block loads
awk -v line="$line" '/return hpml_ctx_status/ { print line } { print }' "$serial" >"$tmp/saves.c"
check "the README's line that saves a model" "$(run "$tmp/saves.c"; [ -s "$tmp/xor.safetensors" ] || echo "no file")"
for f in "$tmp"/readme*.c; do check "a code block of the README" "$(run "$f")"; done
many=$(grep -l 'hpml_launch(' "$tmp"/readme*.c | head -n 1)
diff "$serial" "$many" >"$tmp/lines"
check "README: its serial program and that for many workers do not differ in 1 to 5 lines" "$(awk '
    /^</ { old++ } /^>/ { new++ }
    END { n = old > new ? old : new; if (n < 1 || n > 5) print n " lines" }' "$tmp/lines")"
check "README: its serial program" "$(run "$serial")"
cp "$tmp/out" "$tmp/alone"
check "README: three ranks learn what one learns" "$(HPML_RUN=threads:3 run "$many"
    sort "$tmp/out" "$tmp/alone" | sed 's/.*, //' | uniq -c | awk '$1 != 4 { print "three ranks and one: " $0 }')"
check "README: one of two processes without MPI trains by itself" "$(HPML_RUN= PMI_SIZE=2 PMI_RANK=0 run "$many" |
    grep -q 'mpicc -DHPML_USE_MPI' || echo "this error is missing: built without MPI")"
echo "$passed passed, $failed failed, $skipped skipped"
[ $failed -eq 0 ]

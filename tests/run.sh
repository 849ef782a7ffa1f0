#!/bin/sh
# run.sh [-j N] PROGRAM...: runs test programs with a time limit, those after -j N N at a time, and adds up their
# counts, in the order of the arguments; at the end, the times of the slowest five. A program prints "N passed, N
# failed, N skipped" at its end; one that prints no counts is one test: exit 0 passed, 77 skipped, else failed.
log=build/log
if [ "$1" = --one ]; then
    name=$(basename "$2")
    case $2 in *.sh) set -- sh "$2" ;; *) set -- "$2" ;; esac
    began=$(date +%s)
    timeout "${HPML_TEST_SECONDS:-400}" "$@" >"$log/$name.log" 2>&1 </dev/null
    code=$?
    echo "$(($(date +%s) - began)) s $name" >"$log/$name.time"
    echo $code >"$log/$name.exit"
    echo "$name"
    exit
fi
mkdir -p $log
rm -f $log/*.exit $log/*.time

start() { # prints the names of the programs as they end
    jobs=1
    while [ $# -gt 0 ]; do
        group=
        if [ "$1" = -j ]; then jobs=$2; shift 2; fi
        while [ $# -gt 0 ] && [ "$1" != -j ]; do group="$group $1"; shift; done
        echo $group | xargs -n 1 -P "$jobs" sh tests/run.sh --one
    done
}

ends() { # what failed comes first, why a program ended comes last; between may lie a thousand lines of a sanitizer
    awk '{ line[NR] = substr($0, 1, 200) } END { for (i = 1; i <= NR; i++) if (i <= 25 || i > NR - 15) print line[i] }'
}

report() {
    passed=0 failed=0 skipped=0
    while [ $# -gt 0 ]; do
        if [ "$1" = -j ]; then shift 2; continue; fi
        name=$(basename "$1") code=killed
        shift
        while [ ! -s "$log/$name.exit" ] && read -r ended; do :; done
        [ -s "$log/$name.exit" ] && read -r code <"$log/$name.exit"
        counts=$(grep -E '^[0-9]+ passed, [0-9]+ failed, [0-9]+ skipped$' "$log/$name.log" | tail -n 1)
        bad=0
        if [ -n "$counts" ]; then
            rest=${counts#*, } last=${counts##*, } bad=${rest%% *}
            passed=$((passed + ${counts%% *})) skipped=$((skipped + ${last%% *}))
            [ $bad -gt 0 ] || [ "$code" = 0 ] || [ "$code" = 77 ] || bad=1
        elif [ "$code" = 0 ]; then passed=$((passed + 1)) counts=passed
        elif [ "$code" = 77 ]; then skipped=$((skipped + 1)) counts="skipped: $(tail -n 1 "$log/$name.log")"
        else bad=1 counts="failed, exit $code"
        fi
        failed=$((failed + bad))
        echo "$name: $counts"
        [ "$code" = 0 ] || [ "$code" = 77 ] || grep -v '^ok ' "$log/$name.log" | ends
    done
    cat $log/*.time | sort -rn | head -n 5
    echo "$passed passed, $failed failed, $skipped skipped"
    [ $failed -eq 0 ]
}
start "$@" | report "$@"

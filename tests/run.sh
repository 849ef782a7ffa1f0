#!/bin/sh
# run.sh [-j N] PROGRAM...: runs test programs with a time limit, those after -j N N at a time, and adds up their
# counts. Each program's result is printed as it ends; on a terminal a last line says what is running and for how long.
# At the end: the slowest five, the reasons of what was skipped, the counts. A program prints "N passed, N failed, N
# skipped" at its end, and "skip NAME (REASON)" or "skip N checks (REASON)" for what it skips; one that prints no counts
# is one test: exit 0 passed, 77 skipped (its last line is the reason), else failed.
log=build/log
if [ "$1" = --one ]; then # in a process of its own, for xargs
    name=$(basename "$2")
    case $2 in *.sh) set -- sh "$2" ;; *) set -- "$2" ;; esac
    began=$(date +%s)
    echo "$began" >"$log/$name.began"
    timeout "${HPML_TEST_SECONDS:-400}" "$@" >"$log/$name.log" 2>&1 </dev/null
    code=$?
    echo "$(($(date +%s) - began)) s $name" >"$log/$name.time"
    echo $code >"$log/$name.exit"
    echo "$name"
    exit
fi
mkdir -p $log
last=$(cat $log/took 2>/dev/null)
rm -f $log/*.exit $log/*.time $log/*.began

start() { # prints the names of the programs as they end, and "tick" every second
    while sleep 1; do echo tick; done &
    ticker=$!
    jobs=1
    while [ $# -gt 0 ]; do
        group=
        if [ "$1" = -j ]; then jobs=$2; shift 2; fi
        while [ $# -gt 0 ] && [ "$1" != -j ]; do group="$group $1"; shift; done
        echo $group | xargs -n 1 -P "$jobs" sh tests/run.sh --one
    done
    kill $ticker
}

ends() { # what failed comes first, why a program ended comes last; between may lie a thousand lines of a sanitizer
    awk '{ line[NR] = substr($0, 1, 200) } END { for (i = 1; i <= NR; i++) if (i <= 25 || i > NR - 15) print line[i] }'
}

running() { # "12 of 49 done; running: check_cuda 62 s, test_gemm 3 s"
    text= now=$(date +%s)
    for file in $log/*.began; do
        name=${file##*/} name=${name%.began}
        [ -s "$file" ] && [ ! -e "$log/$name.exit" ] || continue
        read -r since <"$file"
        text="$text, $name $((now - since)) s"
    done
    echo "$done of $all done; running: ${text#, }"
}

result() { # NAME: adds up and prints what a program has said
    read -r code <"$log/$1.exit"
    counts=$(grep -E '^[0-9]+ passed, [0-9]+ failed, [0-9]+ skipped$' "$log/$1.log" | tail -n 1)
    bad=0
    if [ -n "$counts" ]; then
        rest=${counts#*, } more=${counts##*, } bad=${rest%% *}
        passed=$((passed + ${counts%% *})) skipped=$((skipped + ${more%% *}))
        [ $bad -gt 0 ] || [ "$code" = 0 ] || [ "$code" = 77 ] || bad=1
        grep '^skip .*(.*)$' "$log/$1.log" >>$log/skips
    elif [ "$code" = 0 ]; then passed=$((passed + 1)) counts=passed
    elif [ "$code" = 77 ]; then
        why=$(tail -n 1 "$log/$1.log" | sed 's/^[Ss][Kk][Ii][Pp][a-z]*: *//')
        skipped=$((skipped + 1)) counts="skipped: $why"
        echo "skip $1 ($why)" >>$log/skips
    else bad=1 counts="failed, exit $code"
    fi
    failed=$((failed + bad)) done=$((done + 1))
    [ $live = 0 ] || printf '\r\033[K'
    echo "$1: $counts"
    [ "$code" = 0 ] || [ "$code" = 77 ] || grep -v '^ok ' "$log/$1.log" | ends
}

reasons() { # "15 skipped: 5 x no GPU, 3 x ..."
    sed -E 's/^skip [^(]*\((.*)\)$/\1/; t; d' $log/skips >$log/why
    sed -E 's/^skip ([0-9]+) checks .*/\1/; t; s/.*/1/' $log/skips | paste -d ' ' - $log/why |
        awk '{ n = $1; $1 = ""; count[$0] += n } END { for (why in count) print count[why] " x" why }' |
        sort -rn | sed 's/^/skipped: /'
}

report() {
    passed=0 failed=0 skipped=0 done=0 ticks=0 all=0 live=0 began=$(date +%s)
    [ -t 1 ] && live=1
    for word; do case $word in -j | [0-9]*) ;; *) all=$((all + 1)) ;; esac; done
    : >$log/skips
    echo "$all test programs, about ${last:-5 minutes on 2 cores}${last:+ as the last time}"
    while read -r name; do
        if [ "$name" != tick ]; then result "$name"; continue; fi
        ticks=$((ticks + 1))
        if [ $live = 1 ]; then printf '\r%.79s\033[K' "$(running)"
        elif [ $((ticks % 60)) = 0 ]; then running; fi
    done
    for word; do # killed before it could write its exit status
        case $word in -j | [0-9]*) continue ;; esac
        name=$(basename "$word")
        [ -s "$log/$name.exit" ] || { echo killed >"$log/$name.exit"; result "$name"; }
    done
    took="$((($(date +%s) - began) / 60)) min $((($(date +%s) - began) % 60)) s"
    echo "$took" >$log/took
    echo "took $took; the slowest:" $(cat $log/*.time | sort -rn | head -n 5 | sed 's/$/,/') | sed 's/,$//'
    reasons
    echo "$passed passed, $failed failed, $skipped skipped"
    [ $failed -eq 0 ]
}
start "$@" | report "$@"

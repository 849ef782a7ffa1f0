#!/bin/sh
# run.sh PROGRAM... [alone PROGRAM...]: runs test programs, each with a time limit, and adds up their counts. The
# programs before the word `alone` run two at a time, beginning with those that took longest when they ran last; those
# after it run one at a time. Prints each program's result when it ends; on a terminal a last line shows which programs
# are running and for how long. Prints at the end: the five slowest programs, the reasons of skipped tests, the counts.
# A program prints "N passed, N failed, N skipped" at its end, and "skip NAME (REASON)" or "skip N checks (REASON)" for
# what it skips. A program that prints no counts is one test: exit 0 passed, 77 skipped (its last line is the reason),
# else failed.
log=build/log
if [ "$1" = --one ]; then # PROGRAM: in a process of its own, for xargs
    name=$(basename "$2")
    case $2 in *.sh) set -- sh "$2" ;; *) set -- "$2" ;; esac
    began=$(date +%s)
    echo "$began" >"$log/$name.began"
    timeout "${HPML_TEST_SECONDS:-400}" "$@" >"$log/$name.log" 2>&1 </dev/null
    code=$?
    times >"$log/$name.cpu" # line 2: user and system time of the processes that ended, as 0m1.5s 0m0.2s
    cpu=$(awk -F '[ms ]+' 'NR == 2 { print 60 * ($1 + $3) + $2 + $4 }' "$log/$name.cpu")
    echo "$(($(date +%s) - began)) s $name $cpu" >"$log/$name.time"
    echo $code >"$log/$name.exit"
    echo "$name"
    exit
fi
mkdir -p $log
last=$(cat $log/took 2>/dev/null)
touch $log/times
cat $log/*.time $log/times 2>/dev/null | awk '!known[$3]++' | sort -rn >$log/new && mv $log/new $log/times
rm -f $log/*.exit $log/*.time $log/*.began

slowest_first() { # PROGRAM...: prints the programs that never ran here, then the others, the slowest first
    for program; do echo "$program"; done |
        awk 'FILENAME != "-" { seconds[$3] = $1; next }
            { name = $0; sub(/.*\//, "", name); print name in seconds ? seconds[name] : 1e6, FNR, $0 }' $log/times - |
        sort -k 1,1nr -k 2,2n | cut -d ' ' -f 3
}

start() { # PROGRAM...: prints the programs' names as they end, and "tick" every second
    while sleep 1; do echo tick; done &
    ticker=$!
    pairs=
    while [ $# -gt 0 ] && [ "$1" != alone ]; do
        pairs="$pairs $1"
        shift
    done
    [ $# = 0 ] || shift
    slowest_first $pairs | xargs -n 1 -P 2 sh tests/run.sh --one
    [ $# = 0 ] || echo "$@" | xargs -n 1 sh tests/run.sh --one
    kill $ticker
}

ends() { # prints the first 25 lines (the failed tests) and the last 15 (why the program ended), but not the thousand
    # lines of a sanitizer that may lie between
    awk '{ line[NR] = substr($0, 1, 200) } END { for (i = 1; i <= NR; i++) if (i <= 25 || i > NR - 15) print line[i] }'
}

running() { # prints "12 of 49 done; running: check_cuda 62 s, test_gemm 3 s"
    text= now=$(date +%s)
    for file in $log/*.began; do
        name=${file##*/} name=${name%.began}
        [ -s "$file" ] && [ ! -e "$log/$name.exit" ] || continue
        read -r since <"$file"
        text="$text, $name $((now - since)) s"
    done
    echo "$done of $all done; running: ${text#, }"
}

result() { # NAME: adds a program's counts to the sums and prints them
    read -r code <"$log/$1.exit"
    counts=$(grep -E '^[0-9]+ passed, [0-9]+ failed, [0-9]+ skipped$' "$log/$1.log" | tail -n 1)
    bad=0
    if [ -n "$counts" ]; then # "3 passed, 1 failed, 2 skipped"
        after_passed=${counts#*, } after_failed=${counts##*, } bad=${after_passed%% *}
        passed=$((passed + ${counts%% *})) skipped=$((skipped + ${after_failed%% *}))
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

reasons() { # prints "skipped: 5 x no GPU" for each reason
    sed -E 's/^skip [^(]*\((.*)\)$/\1/; t; d' $log/skips >$log/why
    sed -E 's/^skip ([0-9]+) checks .*/\1/; t; s/.*/1/' $log/skips | paste -d ' ' - $log/why |
        awk '{ n = $1; $1 = ""; count[$0] += n } END { for (why in count) print count[why] " x" why }' |
        sort -rn | sed 's/^/skipped: /'
}

report() { # PROGRAM...: reads what start prints
    passed=0 failed=0 skipped=0 done=0 ticks=0 all=0 live=0 began=$(date +%s)
    [ -t 1 ] && live=1
    for program; do [ "$program" = alone ] || all=$((all + 1)); done
    : >$log/skips
    echo "$all test programs, about ${last:-8 minutes on 2 cores}${last:+ as the last time}"
    while read -r name; do
        if [ "$name" != tick ]; then result "$name"; continue; fi
        ticks=$((ticks + 1))
        if [ $live = 1 ]; then printf '\r%.79s\033[K' "$(running)"
        elif [ $((ticks % 60)) = 0 ]; then running; fi
    done
    for program; do # killed before it could write its exit status
        [ "$program" != alone ] || continue
        name=$(basename "$program")
        [ -s "$log/$name.exit" ] || { echo killed >"$log/$name.exit"; result "$name"; }
    done
    took="$((($(date +%s) - began) / 60)) min $((($(date +%s) - began) % 60)) s"
    echo "$took" >$log/took
    cpu=$(cat $log/*.time | awk '{ cpu += $4 } END { printf "%.1f", cpu / 60 }')
    echo "took $took, $cpu minutes of processor time"
    echo the slowest: $(cat $log/*.time | sort -rn | head -n 5 | sed 's/ [^ ]*$/,/') | sed 's/,$//'
    reasons
    echo "$passed passed, $failed failed, $skipped skipped"
    [ $failed -eq 0 ]
}
start "$@" | report "$@"

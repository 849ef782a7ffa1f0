#!/bin/sh
# storm.sh [FAULTS [SEED [fork]]]: random faults (12 where not said), a third of them each on threads, on forked
# processes and on processes of mpiexec, or all on forked ones: a rank is killed, hangs, calls exit, fails or leaves in
# the middle of some work, and every other rank must end with an error that names it, with no process left behind. Fault
# i has the seed SEED + i, which decides where it is: what a failure prints repeats it. storm.c has works and faults.
faults=${1:-12} seed=${2:-$(date +%s)} only=$3 tmp=$(mktemp -d) passed=0 failed=0 skipped=0
limit=90
. tests/mpi.sh
trap 'rm -rf "$tmp"' EXIT
export UCX_TLS="${UCX_TLS:-^cma}" # or UCX ends a survivor that reads from a process just killed
reason=$(mpi_lacks "$tmp")
if [ -z "$reason" ] && ! "$mpiexec" --version 2>/dev/null | grep -qi hydra; then
    reason="this mpiexec ends all processes with the first; MPICH's does not"
fi

storm() { timeout $limit build/storm "$1" "$tmp/$1" $2 >"$tmp/$1/out" 2>&1; echo $? >"$tmp/$1/exit"; }
sort_of() { # SEED: 0: mpiexec, 1: threads, 2: fork
    if [ -n "$only" ]; then echo 2; else echo $(($1 % 3)); fi
}
processes() { # without cleanup the launcher lets the others live, but sends them a signal
    echo $((2 + $1 / 2 % 3)) >"$tmp/$1/ranks"
    timeout $limit "$mpiexec" -disable-auto-cleanup -n $((2 + $1 / 2 % 3)) \
        sh -c "trap '' USR1; build/storm_ranks $1 $tmp/$1; exit \$?" >"$tmp/$1/out" 2>&1 </dev/null
    echo $? >"$tmp/$1/exit"
}

# Four at a time: they nearly only wait.
i=0
while [ $i -lt "$faults" ]; do
    for j in 1 2 3 4; do
        s=$((seed + i)) i=$((i + 1))
        [ $i -le "$faults" ] || break
        sort=$(sort_of $s)
        if [ $sort = 0 ] && [ -n "$reason" ]; then continue; fi
        mkdir "$tmp/$s"
        case $sort in 0) processes $s & ;; 1) storm $s & ;; 2) storm $s fork & ;; esac
    done
    wait
done

i=0
while [ $i -lt "$faults" ]; do
    s=$((seed + i)) i=$((i + 1)) wrong=
    if [ ! -d "$tmp/$s" ]; then skipped=$((skipped + 1)); continue; fi
    out=$tmp/$s/out code=$(cat "$tmp/$s/exit")
    ranks=$(sed -n 's/^rank [0-9]* of \([0-9]*\) .*/\1/p' "$out" | head -n 1)
    [ "$code" != 124 ] || wrong="not over after $limit s"
    [ "$(grep -c '^good rank' "$out")" = $((${ranks:-0} - 1)) ] || wrong="$wrong; a survivor did not name the rank"
    for pid in $(cat "$tmp/$s"/pid.* 2>/dev/null); do
        if kill -0 "$pid" 2>/dev/null; then wrong="$wrong; process $pid is left" && kill -9 "$pid"; fi
    done
    if [ -z "$wrong" ]; then passed=$((passed + 1)); echo "ok seed $s: $(head -n 1 "$out")"; continue; fi
    failed=$((failed + 1))
    echo "FAIL seed $s (exit $code$wrong); again: sh tests/storm.sh 1 $s $only"
    tail -n 20 "$out"
done
[ $skipped = 0 ] || echo "skip the faults of processes ($reason)"
echo "$passed passed, $failed failed, $skipped skipped"
[ $failed -eq 0 ]

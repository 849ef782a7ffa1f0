#!/bin/sh
# storm_servers.sh [KILLS [SEED]]: trainings with servers, and gossip, on 5 processes of mpiexec, of which one worker is
# killed at a random step (12 trainings where not said): the 4 others must end the training. The losses of five or more
# trainings of one plan have a median at most 5 % above that of trainings without a kill. Not so for ssp, where each
# gradient is a step by itself and the steps on the killed worker's samples are missing. Training i has the seed SEED +
# i: what a failure prints repeats it.
kills=${1:-12} seed=${2:-$(date +%s)} tmp=$(mktemp -d) passed=0 failed=0
. tests/mpi.sh
trap 'rm -rf "$tmp"' EXIT
export UCX_TLS="${UCX_TLS:-^cma}" # or UCX ends a survivor that reads from a process just killed
reason=$(mpi_lacks "$tmp")
if [ -z "$reason" ] && ! "$mpiexec" --version 2>/dev/null | grep -qi hydra; then
    reason="this mpiexec ends all processes with the first; MPICH's does not"
fi
if [ -n "$reason" ]; then
    echo "skip the kills ($reason)"
    echo "0 passed, 0 failed, $kills skipped"
    exit 0
fi

i=0
while [ $i -lt "$kills" ]; do
    s=$((seed + i)) i=$((i + 1))
    HPML_KILL=$s timeout 90 "$mpiexec" -disable-auto-cleanup -n 5 \
        sh -c "trap '' USR1; build/servers_ranks --test processes_that_are_killed_are_lost; exit \$?" \
        >"$tmp/out" 2>&1 </dev/null
    grep '^loss ' "$tmp/out" >>"$tmp/losses"
    good=$(grep -c '^good rank' "$tmp/out")
    if [ "$good" = 4 ]; then passed=$((passed + 1)) && echo "ok seed $s: $(grep -m 1 '^good rank' "$tmp/out")"
    else
        failed=$((failed + 1))
        echo "FAIL seed $s ($good of 4 survivors); again: sh tests/storm_servers.sh 1 $s"
        tail -n 20 "$tmp/out"
    fi
done
median() { cut -d ' ' -f "$1" | sort -n | awk '{ x[NR] = $1 } END { print x[int((NR + 1) / 2)] }'; }
for plan in $(cut -d ' ' -f 4 "$tmp/losses" | sort | uniq -c | awk '$1 >= 5 { print $2 }'); do
    killed=$(grep -F " $plan" "$tmp/losses" | median 2) calm=$(grep -F " $plan" "$tmp/losses" | median 3)
    echo "$plan: loss $killed, without a kill $calm"
    case $plan in *ssp*) continue ;; esac
    if awk -v a="$killed" -v b="$calm" 'BEGIN { exit !(a <= 1.05 * b) }'; then passed=$((passed + 1))
    else failed=$((failed + 1)); echo "FAIL losses of $plan"; fi
done
echo "$passed passed, $failed failed, 0 skipped"
[ $failed -eq 0 ]

#!/bin/sh
# storm_servers.sh [KILLS [SEED]]: trainings with servers, and gossip, on 5 processes of mpiexec, of which one worker is
# killed at a random step (12 trainings where not said): the 4 others must end the training. Training i has the seed
# SEED + i: what a failure prints repeats it.
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
    good=$(grep -c '^good rank' "$tmp/out")
    if [ "$good" = 4 ]; then passed=$((passed + 1)) && echo "ok seed $s: $(grep -m 1 '^good rank' "$tmp/out")"
    else
        failed=$((failed + 1))
        echo "FAIL seed $s ($good of 4 survivors); again: sh tests/storm_servers.sh 1 $s"
        tail -n 20 "$tmp/out"
    fi
done
echo "$passed passed, $failed failed, 0 skipped"
[ $failed -eq 0 ]

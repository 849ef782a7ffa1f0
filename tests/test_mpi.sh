#!/bin/sh
# Communicators on MPI: the checks of comm_check.h on 1 to 4 ranks, 1-bit training as on threads, a host program with
# MPI of its own, and errors. With HPML_TEST_ALL on more numbers of ranks. Skipped (77) without mpicc or an mpiexec that
# works. MPICC and MPIEXEC choose one of several MPIs:
# export MPICC=mpicc.openmpi MPIEXEC=mpiexec.openmpi; ninja ranks; sh tests/test_mpi.sh
. tests/mpi.sh
tmp=$(mktemp -d) passed=0 failed=0
trap 'rm -rf "$tmp"' EXIT
skip() { echo "skipped: $1"; exit 77; }
lack=$(mpi_lacks "$tmp")
[ -z "$lack" ] || skip "$lack"
"$mpicc" -Wall -Wextra -Werror -DHPML_USE_MPI -fsyntax-only tests/mpi_ranks.c || failed=1
limit=30
on() { ranks=$1; shift; timeout $limit "$mpiexec" $mpi_options -n "$ranks" build/mpi_ranks "$@" >"$tmp/out" 2>&1; }
all=$HPML_TEST_ALL
# check NAME EXIT TEXT: the exit status is 0, or for EXIT 1 neither 0 nor a time-out; the output matches TEXT
check() {
    code=$? good=1
    if [ "$2" = 0 ]; then [ $code -eq 0 ] || good=0; else [ $code -ne 0 ] && [ $code -ne 124 ] || good=0; fi
    [ -z "$3" ] || grep -qE "$3" "$tmp/out" || good=0
    if [ $good = 1 ]; then passed=$((passed + 1)); echo "ok $1"
    else failed=$((failed + 1)); echo "FAIL $1 (exit $code)"; tail -n 12 "$tmp/out"; fi
}
# brief RANKS CASE COUNT TEXT: a case in which a busy machine may delay a rank until a deadline has passed or mpiexec
# has ended all ranks. It is run up to three times until TEXT is on COUNT lines; none of the runs may hang.
brief() {
    for try in 1 2 3; do
        on "$1" "$2"; code=$? lines=$(grep -cE "$4" "$tmp/out")
        [ $lines -lt "$3" ] && [ $code -ne 124 ] || break
    done
    return $code
}
# two_report RANKS CASE LINE NAME TEXT: the case ends with TEXT, and two ranks print LINE.
two_report() { brief "$1" "$2" 2 "$3"; check "$4" 1 "$5"; [ $lines -ge 2 ]; check "and 2 ranks print the error" 0 ''; }
for n in ${all:+1} 2 ${all:+3} 4; do on $n correct; check "everything on $n ranks" 0 ''; done
on 3 strategies; check "every strategy on 3 ranks has the bits of threads" 0 ''
for n in 5 ${all:+7 8 16}; do on $n sums; check "all algorithms on $n ranks" 0 ''; done
# The batch script for Slurm, with an srun of our own that starts two ranks and makes the work short.
mkdir "$tmp/slurm"
{ echo '#!/bin/sh'; echo "exec timeout $limit $mpiexec $mpi_options -n 2 \"\$@\" --samples 2000 --epochs 1 --batch 256"
} >"$tmp/slurm/srun"
chmod +x "$tmp/slurm/srun"
(here=$(pwd) && ln -s "$here/build" "$tmp/slurm/build" && cd "$tmp/slurm" &&
    PATH=$tmp/slurm:$PATH SLURM_JOB_ID=7 sh "$here/examples/cluster/cpu.sbatch") >"$tmp/out" 2>&1
check "examples/cluster/cpu.sbatch" 0 '^2 workers \(mpi\)'
[ -s "$tmp/slurm/out-7/checkpoint.safetensors" ]; check "and its checkpoint" 0 ''
# 1-bit training as on threads. The tests of accuracy and of times run only with 2 ranks, because each needs a core.
onebit() { timeout 200 "$mpiexec" $mpi_options -n $1 build/onebit_ranks --filter "$2" >"$tmp/out" 2>&1; }
onebit 2 ''; check "1-bit training on 2 ranks" 0 '^8 passed'
timeout 100 "$mpiexec" $mpi_options -n 3 build/servers_ranks >"$tmp/out" 2>&1
check "workers and servers on 3 ranks" 0 '^1 passed'
timeout 100 "$mpiexec" $mpi_options -n 4 build/mesh_ranks >"$tmp/out" 2>&1
check "all factorizations of 4 ranks" 0 '^1 passed'
if [ -n "$all" ]; then
    onebit 4 ''; check "1-bit training on 4 ranks" 0 '^6 passed, 0 failed, 3 skipped'
fi
for r in 0 1; do
    HPML_TEST_FAILS=$r timeout 20 "$mpiexec" $mpi_options -n 2 build/onebit_ranks --filter ends_the_job >"$tmp/out" 2>&1
    check "a test that fails on rank $r ends the other" 1 'test_onebit.c:[0-9]+: me != atoi'
    [ $r = 1 ] || { grep -q '^0 passed, 1 failed' "$tmp/out"; check "and prints how many failed" 0 ''; }
done
for n in ${all:+2} 4; do
    on $n traffic; check "bytes and rounds on $n ranks" 0 ''
    on $n counted; check "counters and log of a launch on $n ranks" 0 ''
    on $n only_messages; check "no collectives on $n ranks" 1 'refuses collectives'
    on $n timeline; check "one timeline of $n ranks" 0 ''
    on $n large; check "messages of many pieces on $n ranks" 0 ''
done
[ -z "$all" ] || { limit=60; on 2 huge; check "counts beyond 2^31" 0 ''; limit=30; }
on 2 checked; check "with .check" 0 ''
on 2 single; check "MPI_THREAD_SINGLE: jobs are done at once" 0 ''
on 2 multiple; check "the host program's MPI" 0 ''
on 4 part; check "a part of the world" 0 ''
on 2 before; check "MPI not initialized" 1 'MPI is not initialized; call MPI_Init'
on 2 after; check "MPI over" 1 'MPI is over'
on 2 twice; check "a second launch, when the first has ended MPI" 1 'MPI is over; .* or use hpml_launch once'
on 2 free_late; check "a context freed after MPI_Finalize" 0 ''
on 2 many_parts; check "150 parts, then too many" 1 'split: 128 communicators live on a rank'
on 3 native_parts; check "MPI's own allreduce on a part" 1 'a part of a communicator has no MPI communicator'
brief 3 works 3 'all came'; check "a rank that works for four deadlines" 0 'all came'
brief 3 works_beside 3 'all came'; check "a rank that works while a job of its own waits" 0 'all came'
brief 2 works_to_end 2 'all came'; check "a rank that works as long as it announced" 0 'all came'
on 2 part_outlives; check "a part that outlives the communicator it was split from" 0 ''
hung='waited 1 s for rank 1 (in receive|to free)'
brief 3 hangs_after_a_wait 1 "$hung"; check "a rank that hangs after a long wait is held responsible" 1 "$hung"
brief 2 hangs_while_busy 1 'waited 2 seconds'
check "a rank that hangs while it is busy is waited for as long as it announced" 1 'waited 2 seconds'
two_report 3 late 'waited 0.5 s for rank 1 to call hpml_comm_create' "a rank late for hpml_comm_create" \
    'rank [02] failed: waited 0.5 s for rank 1 to call hpml_comm_create|waited 0.5 s for rank 1'
late='waited 1 s for rank 1 to free its communicator'
brief 3 stays 1 "$late"; check "a rank that does not come to the end" 1 "$late"
chained='for rank 3, in|for rank 3 in|which waits for rank 3,'
brief 4 chain 1 "$chained"; check "a chain of ranks that wait" 1 "$chained"
on 2 wrong_number; check "a wrong number of ranks" 1 '3 ranks are wanted, mpiexec started 2'
two_report 3 raises 'rank 1 failed: the loss is NaN' "a rank raises an error" 'rank 1 failed: the loss is NaN'
two_report 3 leaves 'rank 1 has left' "a rank leaves early" \
    'rank 1 has left while this rank waits for it in allreduce|rank . failed'
native='waited 1 s for rank 1, which has left, in allreduce .native.'
two_report 3 leaves_native "$native, step 0" "a rank leaves early, the others are in MPI's own allreduce" "$native"
on 2 killed; check "a rank is killed" 1 ''
# With -disable-auto-cleanup Hydra does not end a job with its first dead process, but sends the others SIGUSR1.
if "$mpiexec" --version 2>/dev/null | grep -qi hydra; then
    for what in killed exits; do # both at a time, because they hardly use a core
        timeout 30 "$mpiexec" -disable-auto-cleanup -n 4 \
            sh -c "trap '' USR1; build/mpi_ranks $what; exit \$?" >"$tmp/$what" 2>&1 </dev/null &
    done
    wait
    for what in killed exits; do
        cp "$tmp/$what" "$tmp/out"
        said='for rank 1.* in allreduce'
        [ $what = killed ] || said='rank 1 failed: called exit in step 0'
        for me in 0 2 3; do
            grep -qE "^at once: rank $me: .*$said" "$tmp/out"
            check "rank 1 $what: rank $me names it within the deadline" 0 ''
        done
    done
fi
who='(for rank 1|rank 0, which waits for rank 1,) in allreduce'
brief 3 stopped 2 "at once: rank [02]: .*$who"; check "a rank is stopped" 1 "at once: rank 0: .*$who"
grep -qE "at once: rank 2: .*$who" "$tmp/out"
check "a rank that waits for a waiting rank names the stopped one" 0 ''
# .survive: rank 1 fails, rank 2 leaves early, all but rank 1 end well.
on 2 survives; check "the loss of the only other rank is survived" 1 'the loss is NaN'
[ "$(grep -c ' ends$' "$tmp/out")" = 1 ]; check "and 1 rank ends well" 0 ''
on 4 survives; check "a rank that fails and one that leaves are survived" 1 'the loss is NaN'
[ "$(grep -c ' ends$' "$tmp/out")" = 3 ]; check "and 3 ranks end well" 0 ''
for seed in 1 2 3 ${all:+4 5 6 7 8}; do
    HPML_TEST_SEED=$seed on 4 survives_deaths
    [ "$(grep -c '^the server ends$' "$tmp/out")" = 1 ]; check "a server outlives its workers, seed $seed" 0 ''
done
on 4 survives_no_sum; check "a sum without one rank" 1 'rank 3 has left'
[ "$(grep -c ' names it$' "$tmp/out")" = 3 ]; check "and 3 ranks name it" 0 ''
two_report 3 exits 'rank 1 failed: called exit in step 0' "a rank calls exit" 'rank 1 failed: called exit in step 0'
two_report 2 another 'rank 0 is in broadcast' "another collective" \
    'rank 0 is in broadcast of 16 .* rank 1 in allreduce of 4'
two_report 2 other_count 'all ranks must pass the same counts' "another count" 'all ranks must pass the same counts'
two_report 2 other_count_checked 'allreduce of 64' "another count, checked" 'allreduce of 32 .* allreduce of 64'
late='waited 0.2 s for rank 1 in allreduce'; brief 2 sleeps 1 "$late"; check "a deadline" 1 "$late"
late='waited 0.4 s for tensor 1 "b1" to get ready on rank 1'
brief 3 not_ready 1 "$late"; check "a tensor that never gets ready" 1 "$late"
on 2 memory; check "no memory on one rank" 0 ''
on 2 threads; check "threads in each process" 1 '"threads:2" in each of the 2 processes .* set .run to "auto" or "mpi"'
on 2 threads_alone; check "threads in each process that are meant" 0 ''
HPML_RUN=threads:2 on 2 threads; check "and meant by HPML_RUN" 0 ''
on 1 threads; check "threads in the only process" 0 ''
export HPML_RUN
for HPML_RUN in auto mpi mpi:3; do on 3 by_environment; check "HPML_RUN=$HPML_RUN" 0 ''; done
HPML_RUN=mpi:2; on 3 by_environment; check "HPML_RUN with a wrong number" 1 '2 ranks are wanted, mpiexec started 3'
HPML_RUN=auto SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=4 timeout 30 build/mpi_ranks by_environment >"$tmp/out" 2>&1
check "HPML_RUN=auto under srun with another MPI" 1 'started 4 processes but MPI says each is alone'
unset HPML_RUN
alone='started 4 processes but MPI says each is alone'
PMI_SIZE=4 timeout 30 build/mpi_ranks correct >"$tmp/out" 2>&1; check "mpiexec of another MPI" 1 "$alone"
SLURM_STEP_NUM_TASKS=4 timeout 30 build/mpi_ranks correct >"$tmp/out" 2>&1; check "srun with another MPI" 1 "$alone"
SLURM_NTASKS=4 timeout 30 build/mpi_ranks correct >"$tmp/out" 2>&1
check "one process inside a batch job of four tasks" 0 ''
echo "$passed passed, $failed failed, 0 skipped"
[ $failed -eq 0 ]

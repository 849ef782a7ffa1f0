#!/bin/sh
# Allreduce on 2 ranks, threads, forked processes and MPI, against MPI_Allreduce and memcpy; a message of forked
# processes against one of threads and of MPI; a ring of 4 ranks where there are 4 cores, as on fewer cores its peer
# would only show what its busy waiting costs. Rounds are interleaved and the best of each counts. Rows go to
# build/bench.jsonl; without MPI only those without it.
rounds=${HPML_BENCH_ROUNDS:-3}
. tests/mpi.sh
tmp=$(mktemp -d) mpi=0 cores=$(getconf _NPROCESSORS_ONLN)
trap 'rm -rf "$tmp"' EXIT
lack=$(mpi_lacks "$tmp")
if [ -n "$lack" ]; then echo "no rows of MPI: $lack"
elif "$mpicc" -O2 -DHPML_USE_MPI tests/bench/bench_comm.c -o build/bench_comm_mpi -lm -lpthread 2>/dev/null
then mpi=1; fi
for round in $(seq "$rounds"); do
    timeout 100 build/bench_comm threads
    timeout 100 build/bench_comm fork
    [ $mpi = 0 ] || timeout 100 "$mpiexec" $mpi_options -n 2 build/bench_comm_mpi mpi
    [ $mpi = 0 ] || [ "$cores" -lt 4 ] || timeout 100 "$mpiexec" $mpi_options -n 4 build/bench_comm_mpi ring
done >build/bench_comm.txt
awk '
function row(name, bytes, ours, peer, theirs) {
    unit = "us"
    ratio = theirs / ours
    ours *= 1e6
    theirs *= 1e6
    printf("%-22s %10d B %12.1f us   %-16s %12.1f us   %6.2f\n", name, bytes, ours, peer, theirs, ratio)
    printf("{\"bench\": \"comm\", \"case\": \"%s %d B\", \"unit\": \"us\", \"hpml\": %.2f, \"peer\": \"%s\", ",
           name, bytes, ours, peer) >>"build/bench.jsonl"
    printf("\"peer_value\": %.2f, \"ratio\": %.3f}\n", theirs, ratio) >>"build/bench.jsonl"
}
function mean(name, a, b) { # geometric, above 64 KB
    sum = 0; n = 0; low = 1e9
    for (s = 262144; s <= 67108864; s *= 4) if ((a, s) in best && (b, s) in best) {
        r = best[b, s] / best[a, s]; sum += log(r); n++; if (r < low) low = r
    }
    if (n) printf("%-22s geometric mean %.2f, worst %.2f (above 64 KB)\n", name, exp(sum / n), low)
}
{ key = $1 SUBSEP $2; if (!(key in best) || $3 < best[key]) best[key] = $3 }
END {
    printf("%-22s %12s %15s   %-16s %15s   %6s\n", "allreduce", "size", "hpml", "peer", "peer", "ratio")
    for (s = 1024; s <= 67108864; s *= 4) if (("ours_threads", s) in best) {
        if (("mpich", s) in best) row("threads, 2 ranks", s, best["ours_threads", s], "MPI_Allreduce", best["mpich", s])
        row("threads, 2 ranks", s, best["ours_threads", s], "memcpy", best["copy_threads", s])
    }
    for (s = 1024; s <= 67108864; s *= 4) if (("ours_fork", s) in best) {
        if (("mpich", s) in best) row("fork, 2 ranks", s, best["ours_fork", s], "MPI_Allreduce", best["mpich", s])
        row("fork, 2 ranks", s, best["ours_fork", s], "threads", best["ours_threads", s])
    }
    for (s = 1024; s <= 67108864; s *= 4) if (("message_fork", s) in best) {
        if (("message_mpi", s) in best)
            row("message of fork", s, best["message_fork", s], "message of MPI", best["message_mpi", s])
        row("message of fork", s, best["message_fork", s], "message of threads", best["message_threads", s])
    }
    for (s = 1024; s <= 67108864; s *= 4) if (("ours_mpi", s) in best) {
        row("mpi, 2 ranks", s, best["ours_mpi", s], "MPI_Allreduce", best["mpich", s])
        row("mpi, 2 ranks", s, best["ours_mpi", s], "memcpy", best["copy_mpi", s])
    }
    for (key in best) { split(key, k, SUBSEP); if (k[1] == "ours_ring")
        row("mpi ring, 4 ranks", k[2], best[key], "MPI_Sendrecv", best["plain_ring", k[2]]) }
    mean("threads", "ours_threads", "mpich"); mean("fork", "ours_fork", "mpich"); mean("mpi", "ours_mpi", "mpich")
}' build/bench_comm.txt

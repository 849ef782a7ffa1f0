# Sourced by scripts that run MPI programs. $mpicc and $mpiexec are the MPI's commands (MPICC and MPIEXEC choose another
# MPI), $mpi_options what Open MPI's mpiexec needs for more ranks than cores and for root.
mpicc=${MPICC:-mpicc} mpiexec=${MPIEXEC:-mpiexec} mpi_options=
if "$mpiexec" --version 2>/dev/null | grep -qiE 'open.?(mpi|rte)'; then
    mpi_options=--oversubscribe
    [ "$(id -u)" != 0 ] || mpi_options="$mpi_options --allow-run-as-root"
fi

# mpi_lacks FOLDER: says why two ranks cannot run here, and what helps; says nothing where they can. Needs a folder for
# a program of its own.
mpi_lacks() {
    command -v "$mpicc" >/dev/null || { echo "no $mpicc: install mpich"; return; }
    command -v "$mpiexec" >/dev/null || { echo "no $mpiexec: install mpich"; return; }
    cat >"$1/two.c" <<'C'
#include <mpi.h>
#include <stdio.h>
int main(int c, char **v)
{
    int n, r;
    MPI_Init(&c, &v);
    MPI_Comm_size(MPI_COMM_WORLD, &n);
    MPI_Comm_rank(MPI_COMM_WORLD, &r);
    if (r == 0) printf("\nranks %d\n", n);
    MPI_Finalize();
    return 0;
}
C
    "$mpicc" "$1/two.c" -o "$1/two" >"$1/two.log" 2>&1 ||
        { echo "$mpicc fails: $(grep -m 1 . "$1/two.log")"; return; }
    timeout 60 "$mpiexec" $mpi_options -n 2 "$1/two" >"$1/two.log" 2>&1 </dev/null
    code=$?
    if grep -q '^ranks 2$' "$1/two.log"; then return; fi
    if grep -q '^ranks 1$' "$1/two.log"; then
        if grep -q '^VERSION_ID="24.04"' /etc/os-release && mpichversion >/dev/null 2>&1; then
            echo "the MPICH package of Ubuntu 24.04 starts each rank alone: install libopenmpi-dev openmpi-bin," \
                "build with MPICC=mpicc.openmpi and run with MPIEXEC=mpiexec.openmpi"
        else echo "each of two ranks is alone: $mpicc and $mpiexec are of different MPIs"; fi
    elif [ $code -eq 124 ]; then echo "$mpiexec did not end within 60 s"
    else echo "$mpiexec fails, exit $code: $(grep -m 1 . "$1/two.log")"; fi
}

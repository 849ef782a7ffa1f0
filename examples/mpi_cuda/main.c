/* What you learn: C by mpicc, kernels by nvcc, one program. Difficulty 2 of 4. Four lines build it, in this folder:
       nvcc  -O2 -arch=native -c kernel.cu -o kernel.o
       mpicc -O2 -DHPML_USE_MPI -DHPML_IMPLEMENTATION -c -x c ../../hpml_comm.h -o hpml.o
       mpicc -O2 -DHPML_USE_MPI -c main.c -o main.o
       mpicc main.o kernel.o hpml.o -o mpi_cuda -L/usr/local/cuda/lib64 -lcudart -lstdc++ -lm -lpthread
       mpiexec -n 4 ./mpi_cuda
   Each rank computes a gradient on a GPU, by the program's own kernels (kernel.cu); the ranks average it with 1 bit for
   each number. hpml_cuda.cuh is not needed, because the library does not use the GPU here.
   prints "4 ranks: loss 5.. -> 0.0.., each rank sent ... bytes"; without a GPU the reason, and exits with 77. */
#include "../../hpml_comm.h"
#include "kernel.h"
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

enum { STEPS = 300 };

static hpml_status train(hpml_comm *comm, float *w, float *grad)
{
    hpml_gradient      g = { "w", grad, 50, WEIGHTS / 50 }; /* rows that share a scale */
    hpml_exchange_desc d = { .count = 1, .tensors = &g, .codec.kind = HPML_CODEC_ONEBIT, .reduce = HPML_MEAN };
    hpml_exchange     *x = hpml_exchange_create(comm, &d);
    hpml_counters      sent = { 0 };
    double             first = 0, last = 0;
    for (int step = 0; step < STEPS; step++) {
        const char *wrong = gpu_gradient(w, grad, &last, hpml_comm_rank(comm), step);
        if (wrong) hpml_ctx_fail(hpml_comm_ctx(comm), HPML_ERR_CUDA, "the gradient of step %d: %s", step, wrong);
        if (step == 0) first = last;
        /* A rank that has failed takes part as well, so that the others get its error. */
        if (hpml_exchange_run(x) != HPML_OK) break;
        for (int i = 0; i < WEIGHTS; i++) w[i] -= 0.2f * grad[i];
    }
    hpml_comm_counters(comm, &sent);
    if (hpml_comm_rank(comm) == 0)
        printf("%d ranks: loss %.4f -> %.4f, each rank sent %lld bytes\n", hpml_comm_size(comm), first, last,
               (long long)sent.bytes);
    return hpml_ctx_status(hpml_comm_ctx(comm));
}

int main(int argc, char **argv)
{
    int level, rank, missing, any;
    MPI_Init_thread(&argc, &argv, MPI_THREAD_FUNNELED, &level);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    const char *wrong = gpu_open(rank);
    missing = wrong != NULL;
    MPI_Allreduce(&missing, &any, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD);
    if (any) { /* all ranks end alike */
        if (wrong) printf("SKIP: rank %d has no GPU: %s\n", rank, wrong);
        MPI_Finalize();
        return 77;
    }
    hpml_ctx   *ctx    = hpml_ctx_create(&(hpml_ctx_desc){ .threads = 1, .log = hpml_log_stderr });
    hpml_comm  *comm   = hpml_comm_create(ctx, &(hpml_comm_desc){ .transport = HPML_TRANSPORT_MPI });
    float      *w      = (float *)calloc(2 * WEIGHTS, sizeof *w); /* the parameters, then their gradient */
    hpml_status status = comm && w ? train(comm, w, w + WEIGHTS) : HPML_ERR_MEMORY;
    free(w);
    gpu_close();
    hpml_ctx_free(ctx); /* before MPI_Finalize */
    MPI_Finalize();
    return status != HPML_OK;
}

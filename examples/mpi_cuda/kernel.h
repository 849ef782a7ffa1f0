/* Functions of kernel.cu that main.c calls: C names, so that a C compiler and nvcc can be mixed. Each returns NULL, or
   the text of a CUDA error. */
#ifndef MPI_CUDA_KERNEL_H
#define MPI_CUDA_KERNEL_H

enum { WEIGHTS = 2000, SAMPLES = 512 };

#ifdef __cplusplus
extern "C" {
#endif
const char *gpu_open(int rank); /* takes GPU number `rank` modulo the GPUs of this machine, and memory on it */
/* w (WEIGHTS): parameters; grad (WEIGHTS): their gradient on this rank's samples of this step; loss: of the samples. */
const char *gpu_gradient(const float *w, float *grad, double *loss, int rank, int step);
void        gpu_close(void);
#ifdef __cplusplus
}
#endif

#endif

/* hpml_cuda.cuh's body for a GPU: linked to C programs. */
#define HPML_CUDA_IMPLEMENTATION
#include "../hpml_cuda.cuh"
#include "own_kernel.h"

/* hpml_cuda.cuh's body, the very text that nvcc compiles, for the emulation in cuda_on_cpu.h. */
#define HPML_CUDA_ON_CPU
#include "cuda_on_cpu.h"
#define HPMLG_SLOT_BYTES ((size_t)256 << 10) /* so that tests fill the ring */
#define HPML_CUDA_IMPLEMENTATION
#include "../hpml_cuda.cuh"

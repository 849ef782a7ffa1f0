/* The functions of the emulation alone, to link to short files with kernels (CUDA_ON_CPU_LINKED). */
#define HPML_CUDA_ON_CPU
#include "cuda_on_cpu.h"

/* The body of hpml_cuda.cuh, the same text that nvcc compiles, for the emulation in cuda_on_cpu.h. */
#define HPML_CUDA_ON_CPU
#define HPML_USE_NCCL
#include "cuda_on_cpu.h"
#include "cublas_on_cpu.h"
#include "cudnn_on_cpu.h"
#define HPMLG_SLOT_BYTES ((size_t)256 << 10) /* small, so that tests fill the ring */
#include "nccl_on_cpu.h"
/* As exact as on the device, and not more exact. */
#define expf(x)  emu::near(expf(x), 2)
#define exp2f(x) emu::near(exp2f(x), 2)
#define tanhf(x) emu::near(tanhf(x), 2)
#define erff(x)  emu::near(erff(x), 2)
#define logf(x)  emu::near(logf(x), 1)
#define log2f(x) emu::near(log2f(x), 1)
#define HPML_CUDA_IMPLEMENTATION
#include "../../hpml_cuda.cuh"
#include "../own_kernel.h"

/* Faults that tests in C inject into the emulation, and counters that they read. A GPU has neither. */
extern "C" void cuda_on_cpu_fault(const char *what, long k)
{
    auto &e = emu::all;
    if (strcmp(what, "no device") == 0) e.absent = cudaErrorNoDevice;
    else if (strcmp(what, "no driver") == 0) e.absent = cudaErrorInsufficientDriver;
    else if (strcmp(what, "other architecture") == 0) e.wrong_image = true;
    else if (strcmp(what, "malloc") == 0) e.fail_malloc = k;
    else if (strcmp(what, "launch") == 0) e.fail_launch = k;
    else if (strcmp(what, "multiprocessors") == 0) e.sms = (int)k;
    else if (strcmp(what, "order") == 0) cuda_on_cpu_order((unsigned)k);
    else if (strcmp(what, "lazy") == 0) cuda_on_cpu_lazy((unsigned)k);
    else if (strcmp(what, "cublas") == 0) cublas_on_cpu_refuses = (int)k;
    else if (strcmp(what, "cudnn") == 0) cudnn_on_cpu_refuses = (int)k;
    else if (strcmp(what, "memory") == 0) e.memory = (size_t)k;
    else if (strcmp(what, "libraries") == 0) libraries_on_cpu = (int)k;
    else if (strcmp(what, "capture") == 0) e.fail_capture = (int)k;
    else if (strcmp(what, "clock") == 0) e.clock_set = true, e.launch_us = k;
    else if (strcmp(what, "proposals") == 0) cublas_on_cpu_proposals = (int)k;
    else if (strncmp(what, "us ", 3) == 0) cublas_on_cpu_us[atoi(what + 3)] = (int)k;
    else if (strcmp(what, "fused us") == 0) cublas_on_cpu_fused_us = (int)k;
    else if (strcmp(what, "cublas version") == 0) cublas_on_cpu_version = (size_t)k;
    else {
        cuda_on_cpu_reset(), cublas_on_cpu_refuses = cudnn_on_cpu_refuses = 0;
        cublas_on_cpu_proposals = 1, cublas_on_cpu_fused_us = 0, cublas_on_cpu_version = 120000;
        memset(cublas_on_cpu_us, 0, sizeof cublas_on_cpu_us);
        libraries_on_cpu = library_modes(getenv("HPML_LIBRARIES"));
        e.fail_capture   = library_is(LIBRARY_CAPTURE) ? 4 : 0;
    }
}
static const bool cuda_on_cpu_started = (cuda_on_cpu_fault("none", 0), true); /* reads HPML_LIBRARIES before main */

extern "C" long cuda_on_cpu_count(const char *what)
{
    auto &e = emu::all;
    if (strcmp(what, "libraries") == 0) return libraries_on_cpu;
    if (strncmp(what, "algorithm ", 10) == 0) return cublas_on_cpu_used[atoi(what + 10) - 21];
    if (strncmp(what, "cublas ", 7) == 0) return cublas_on_cpu_ran[atoi(what + 7)];
    if (strcmp(what, "cublas") == 0) return cublas_on_cpu_live;
    if (strncmp(what, "cudnn ", 6) == 0) return cudnn_on_cpu_ran[atoi(what + 6)];
    if (strcmp(what, "cudnn") == 0) return cudnn_on_cpu_live;
    if (strcmp(what, "bytes") == 0) return (long)e.bytes_live;
    if (strcmp(what, "synchronisations") == 0) return e.count.synchronisations;
    if (strcmp(what, "graphs") == 0) return e.count.graph_launches;
    return strcmp(what, "mallocs") == 0 ? e.count.mallocs : e.count.launches;
}

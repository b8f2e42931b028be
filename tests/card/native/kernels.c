/* Kernels: they are registered and launched, and do nothing; a launch can be made to fail. */
#define _GNU_SOURCE
#include "card.h"
#include <stdlib.h>
#include <string.h>

EXPORT void **__cudaRegisterFatBinary(void *fat) { return calloc(1, sizeof(void *)); }
EXPORT void __cudaRegisterFatBinaryEnd(void **handle) {}
EXPORT void __cudaUnregisterFatBinary(void **handle) {}
EXPORT void __cudaRegisterFunction(void **h, const char *function, char *device_function, const char *name, int limit,
                                   void *tid, void *bid, void *bd, void *gd, int *w) {}
EXPORT void __cudaRegisterVar(void **h, char *v, char *a, const char *n, int e, size_t s, int c, int g) {}
EXPORT char __cudaInitModule(void **h) { return 1; }
EXPORT cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *function) {
    *kernel = (cudaKernel_t)function;
    return 0;
}

typedef struct { dim3 grid, block; size_t shared; cudaStream_t stream; } Configuration;
static _Thread_local Configuration pushed[8];
static _Thread_local int depth;
EXPORT unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, struct CUstream_st *stream) {
    pushed[depth++ & 7] = (Configuration){grid, block, shared, stream};
    return 0;
}
EXPORT cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    Configuration *top = &pushed[--depth & 7];
    *grid = top->grid, *block = top->block, *shared = top->shared, *(cudaStream_t *)stream = top->stream;
    return 0;
}
static cudaError_t launch(void) {
    launches++;
    return is_due(&launch_failure) ? fail((cudaError_t)launch_failure.code) : cudaSuccess;
}
EXPORT cudaError_t cudaLaunchKernel(const void *f, dim3 g, dim3 b, void **a, size_t s, cudaStream_t t) {
    return launch();
}
EXPORT cudaError_t __cudaLaunchKernel(cudaKernel_t f, dim3 g, dim3 b, void **a, size_t s, cudaStream_t t) {
    return launch();
}
EXPORT cudaError_t cudaLaunchCooperativeKernel(const void *f, dim3 g, dim3 b, void **a, size_t s, cudaStream_t t) {
    return launch();
}
EXPORT cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *c, const void *f, void **a) { return launch(); }
EXPORT cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *a, const void *f) {
    memset(a, 0, sizeof *a);
    a->maxThreadsPerBlock = 1024;
    a->numRegs = 32;
    a->ptxVersion = a->binaryVersion = model.major * 10 + model.minor;
    a->maxDynamicSharedSizeBytes = 49152;
    return 0;
}
EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *count, const void *f, int threads,
                                                                           size_t shared, unsigned flags) {
    int blocks = model.threads_per_multiprocessor / (threads > 0 ? threads : 1);
    *count = blocks > model.blocks_per_multiprocessor ? model.blocks_per_multiprocessor : blocks < 1 ? 1 : blocks;
    return 0;
}
EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *c, const void *f, int t, size_t s) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(c, f, t, s, 0);
}
EXPORT cudaError_t cudaGetSymbolAddress(void **pointer, const void *symbol) {
    static char zeros[4096];
    *pointer = zeros;
    return 0;
}

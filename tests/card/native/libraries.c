/* cuBLAS, cuSOLVER, cuSPARSE, cuFFT and NCCL as far as torch needs an answer: handles, and that all went well. */
#define _GNU_SOURCE
#include "card.h"
#include <stdlib.h>
#include <string.h>

static void *make(size_t size) { return calloc(1, size); }

EXPORT int cublasCreate_v2(void **handle) {
    *handle = make(64);
    return 0;
}
EXPORT int cublasGetPointerMode_v2(void *h, int *mode) {
    *mode = 0;
    return 0;
}
EXPORT int cublasGetMathMode(void *h, int *mode) {
    *mode = 0;
    return 0;
}
EXPORT int cublasLtMatmulDescCreate(void **d, int c, int s) {
    *d = make(256);
    return 0;
}
EXPORT int cublasLtMatmulPreferenceCreate(void **p) {
    *p = make(256);
    return 0;
}
EXPORT int cublasLtMatrixLayoutCreate(void **l, int t, uint64_t r, uint64_t c, int64_t ld) {
    *l = make(256);
    return 0;
}
EXPORT int cublasLtMatmulAlgoGetHeuristic(void *h, void *d, void *a, void *b, void *c, void *dd, void *p,
                                          int wanted, void *results, int *found) {
    memset(results, 0, 64 + 8 + 4 + 4 + 16);
    *found = 1;
    return 0;
}
EXPORT size_t cublasLtGetVersion(void) { return 130101; }
EXPORT int cusolverDnCreate(void **h) {
    *h = make(64);
    return 0;
}
EXPORT int cusparseCreate(void **h) {
    *h = make(64);
    return 0;
}
EXPORT int ncclGetVersion(int *v) {
    *v = 22907;
    return 0;
}
EXPORT const char *ncclGetErrorString(int e) { return "no error"; }
EXPORT int cufftCreate(int *plan) {
    *plan = 1;
    return 0;
}
EXPORT int cufftXtMakePlanMany(int p, int r, void *n, void *ie, long long is, long long id, int it, void *oe,
                               long long os, long long od, int ot, long long b, size_t *work, int et) {
    *work = 0;
    return 0;
}

/* Streams, events and graphs. All work is done when it is enqueued; a capture records nothing. */
#define _GNU_SOURCE
#include "card.h"
#include <stdlib.h>
#include <time.h>

typedef struct { int priority, capturing; unsigned long long capture; void *graph; } Stream;
static unsigned long long captures;
static void *make(size_t size) { return calloc(1, size); }

EXPORT cudaError_t cudaStreamCreateWithPriority(cudaStream_t *s, unsigned f, int priority) {
    Stream *made = make(sizeof *made);
    made->priority = priority;
    *s = (cudaStream_t)made;
    return cudaSuccess;
}
EXPORT cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned f) {
    return cudaStreamCreateWithPriority(s, f, 0);
}
EXPORT cudaError_t cudaStreamCreate(cudaStream_t *s) { return cudaStreamCreateWithPriority(s, 0, 0); }
EXPORT cudaError_t cudaStreamGetPriority(cudaStream_t s, int *priority) {
    *priority = (uintptr_t)s > 2 ? ((Stream *)s)->priority : 0;
    return cudaSuccess;
}
static int is_capturing(cudaStream_t s) { return (uintptr_t)s > 2 && ((Stream *)s)->capturing; }
EXPORT cudaError_t cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *status) {
    *status = is_capturing(s) ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
EXPORT cudaError_t cudaStreamBeginCapture(cudaStream_t s, enum cudaStreamCaptureMode m) {
    if ((uintptr_t)s <= 2) return fail(cudaErrorStreamCaptureUnsupported);
    Stream *stream = (Stream *)s;
    stream->capturing = 1;
    stream->capture = ++captures;
    stream->graph = make(64);
    return 0;
}
EXPORT cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t *graph) {
    ((Stream *)s)->capturing = 0;
    *graph = (cudaGraph_t)((Stream *)s)->graph;
    return cudaSuccess;
}
EXPORT cudaError_t cudaStreamGetCaptureInfo(cudaStream_t s, enum cudaStreamCaptureStatus *status,
                                            unsigned long long *id, cudaGraph_t *graph,
                                            const cudaGraphNode_t **dependencies, const cudaGraphEdgeData **edges,
                                            size_t *count) {
    cudaStreamIsCapturing(s, status);
    if (id) *id = is_capturing(s) ? ((Stream *)s)->capture : 0;
    if (graph) *graph = is_capturing(s) ? (cudaGraph_t)((Stream *)s)->graph : NULL;
    if (dependencies) *dependencies = NULL;
    if (edges) *edges = NULL;
    if (count) *count = 0;
    return 0;
}
EXPORT cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *e, cudaGraph_t g, unsigned long long f) {
    *e = make(64);
    return cudaSuccess;
}
EXPORT cudaError_t cudaGraphGetNodes(cudaGraph_t g, cudaGraphNode_t *nodes, size_t *count) {
    *count = 1;
    return cudaSuccess;
}

typedef struct { struct timespec at; } Event;
EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned f) {
    *e = make(sizeof(Event));
    return cudaSuccess;
}
EXPORT cudaError_t cudaEventCreate(cudaEvent_t *e) { return cudaEventCreateWithFlags(e, 0); }
EXPORT cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) {
    clock_gettime(CLOCK_MONOTONIC, &((Event *)e)->at);
    return cudaSuccess;
}
EXPORT cudaError_t cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned f) {
    return cudaEventRecord(e, s);
}
EXPORT cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t a, cudaEvent_t b) {
    const struct timespec *x = &((Event *)a)->at, *y = &((Event *)b)->at;
    *ms = (float)((double)(y->tv_sec - x->tv_sec) * 1e3 + (double)(y->tv_nsec - x->tv_nsec) / 1e6);
    return 0;
}
EXPORT cudaError_t cudaEventDestroy(cudaEvent_t e) {
    free(e);
    return cudaSuccess;
}
EXPORT cudaError_t cudaStreamAddCallback(cudaStream_t s, cudaStreamCallback_t f, void *data, unsigned flags) {
    f(s, 0, data);
    return cudaSuccess;
}
EXPORT cudaError_t cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t f, void *data) {
    f(data);
    return cudaSuccess;
}

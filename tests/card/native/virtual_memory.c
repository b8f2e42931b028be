/* The driver's virtual memory, of which torch makes expandable segments: addresses, physical memory, mappings. */
#define _GNU_SOURCE
#include "card.h"
#include <stdlib.h>

typedef struct { size_t size; int device, references; } Physical;
typedef struct Mapping { char *start; size_t size; Physical *physical; struct Mapping *next; } Mapping;
static Mapping *mappings;

static void drop(Physical *physical) {
    if (--physical->references) return;
    used[physical->device] -= physical->size;
    free(physical);
}

EXPORT CUresult cuMemAddressReserve(CUdeviceptr *pointer, size_t size, size_t alignment, CUdeviceptr hint,
                                    unsigned long long flags) {
    pthread_mutex_lock(&lock);
    char *place = find_gap(current_device, size);
    if (place) add_span(place, size, RESERVED_ADDRESSES);
    pthread_mutex_unlock(&lock);
    *pointer = (CUdeviceptr)place;
    return place ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

EXPORT CUresult cuMemAddressFree(CUdeviceptr pointer, size_t size) {
    pthread_mutex_lock(&lock);
    Span *span = find_span((void *)pointer);
    if (span) remove_span(span);
    pthread_mutex_unlock(&lock);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *p,
                            unsigned long long flags) {
    pthread_mutex_lock(&lock);
    Physical *made = NULL;
    if (take(p->location.id, size)) {
        made = malloc(sizeof *made);
        *made = (Physical){size, p->location.id, 1};
    }
    pthread_mutex_unlock(&lock);
    *handle = (CUmemGenericAllocationHandle)(uintptr_t)made;
    return made ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

EXPORT CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    pthread_mutex_lock(&lock);
    drop((Physical *)(uintptr_t)handle);
    pthread_mutex_unlock(&lock);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemMap(CUdeviceptr pointer, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
                         unsigned long long flags) {
    pthread_mutex_lock(&lock);
    Mapping *made = malloc(sizeof *made);
    *made = (Mapping){(char *)pointer, size, (Physical *)(uintptr_t)handle, mappings};
    mappings = made;
    made->physical->references++;
    pthread_mutex_unlock(&lock);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemSetAccess(CUdeviceptr pointer, size_t size, const CUmemAccessDesc *d, size_t n) {
    make_accessible((char *)pointer, size);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemUnmap(CUdeviceptr pointer, size_t size) {
    char *start = (char *)pointer;
    pthread_mutex_lock(&lock);
    for (Mapping **link = &mappings; *link;) {
        Mapping *here = *link;
        if (here->start >= start && here->start < start + size) {
            *link = here->next;
            drop(here->physical);
            free(here);
        } else {
            link = &here->next;
        }
    }
    make_inaccessible(start, size);
    pthread_mutex_unlock(&lock);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemGetAllocationGranularity(size_t *granularity, const CUmemAllocationProp *p,
                                              CUmemAllocationGranularity_flags option) {
    *granularity = PAGE;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemGetAddressRange(CUdeviceptr *base, size_t *size, CUdeviceptr pointer) {
    Span *span = find_span((void *)pointer);
    if (!span) return CUDA_ERROR_NOT_FOUND;
    if (base) *base = (CUdeviceptr)span->start;
    if (size) *size = span->size;
    return CUDA_SUCCESS;
}


/* What the parts of the stand-in card share: the model of the card, its memory's account, planned failures.
 *
 * The interface that tests call while a process runs is at the end of card.c; README.md describes it.
 */
#pragma once
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))
#define MIB (1ull << 20)
#define PAGE (2 * MIB) /* the unit in which a driver gives out memory */
#define MAX_DEVICES 8
#define MAX_TENANTS 16

typedef struct {
    const char *key, *name;
    int major, minor, multiprocessors, threads_per_multiprocessor, blocks_per_multiprocessor;
    int shared_per_multiprocessor, shared_opt_in, l2_cache, bus_width, clock_khz;
    size_t total, context; /* bytes of the card, and what a process takes of it before its first tensor */
} Model;

typedef struct { unsigned pid; size_t bytes; } Tenant;

/* Calls first .. first + count - 1 since the failure was planned fail; first 0 is none. */
typedef struct { unsigned long long first, count, seen; int code; } PlannedFailure;

extern Model model;
extern int device_count, tenant_count, reads_are_zero;
extern size_t used[MAX_DEVICES], peak[MAX_DEVICES];
extern Tenant tenants[MAX_TENANTS];
extern unsigned long long launches, mallocs, frees, refusals;
extern PlannedFailure memory_failure, launch_failure;
extern pthread_mutex_t lock; /* held by whoever changes spans, mappings or the account */
extern _Thread_local int current_device;

int is_due(PlannedFailure *failure);
cudaError_t fail(cudaError_t error);
size_t bytes_of_tenants(void);
int take(int device, size_t size); /* physical memory; 0 where the card refuses */

typedef enum { DEVICE_MEMORY, RESERVED_ADDRESSES, HOST_MEMORY } Kind;
typedef struct { char *start; size_t size; Kind kind; } Span;

void make_address_space(void);
Span *find_span(const void *address);
void add_span(char *start, size_t size, Kind kind);
void remove_span(Span *span);
char *find_gap(int device, size_t size);
int device_of(const void *pointer);
int is_device(const void *pointer);
void make_accessible(char *start, size_t size);
void make_inaccessible(char *start, size_t size); /* gives the host's pages back */

void fill_uuid(char *bytes, int device);

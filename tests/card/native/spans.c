/* Address space that stands for the memory of the cards, and which parts of it are in use. */
#define _GNU_SOURCE
#include "card.h"
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define RANGE (1ull << 40) /* of each device */

static char *arena, *arena_end;
static Span *spans; /* ascending */
static size_t span_count, span_capacity;

void make_address_space(void) {
    arena = mmap(NULL, RANGE * device_count, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (arena == MAP_FAILED) abort();
    arena = (char *)(((uintptr_t)arena + PAGE - 1) / PAGE * PAGE);
    arena_end = arena + RANGE * device_count - PAGE;
}

int device_of(const void *pointer) { return (int)(((const char *)pointer - arena) / RANGE); }
int is_device(const void *pointer) { return (const char *)pointer >= arena && (const char *)pointer < arena_end; }

void make_accessible(char *start, size_t size) {
    mprotect(start, size, PROT_READ | PROT_WRITE);
}

void make_inaccessible(char *start, size_t size) {
    mmap(start, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
}

static size_t find_after(const char *address) { /* the first span that starts beyond */
    size_t low = 0, high = span_count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (spans[middle].start > address) high = middle;
        else low = middle + 1;
    }
    return low;
}

Span *find_span(const void *address) {
    size_t index = find_after(address);
    if (!index) return NULL;
    Span *span = &spans[index - 1];
    return (const char *)address < span->start + span->size ? span : NULL;
}

void add_span(char *start, size_t size, Kind kind) {
    if (span_count == span_capacity) {
        span_capacity = span_capacity * 2 + 64;
        spans = realloc(spans, span_capacity * sizeof *spans);
    }
    size_t index = find_after(start);
    memmove(spans + index + 1, spans + index, (span_count - index) * sizeof *spans);
    spans[index] = (Span){start, size, kind};
    span_count++;
}

void remove_span(Span *span) {
    size_t index = (size_t)(span - spans);
    memmove(span, span + 1, (span_count - index - 1) * sizeof *spans);
    span_count--;
}

char *find_gap(int device, size_t size) { /* the lowest place that is large enough */
    char *place = arena + RANGE * device, *end = place + RANGE - PAGE;
    for (size_t i = find_after(place - 1); i < span_count && spans[i].start < end; i++) {
        if ((size_t)(spans[i].start - place) >= size) break;
        place = spans[i].start + (spans[i].size + PAGE - 1) / PAGE * PAGE;
    }
    return place + size <= end ? place : NULL;
}

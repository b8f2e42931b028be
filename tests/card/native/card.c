/* The model of the card, the account of its memory, and what a test may change while the process runs. */
#define _GNU_SOURCE
#include "card.h"
#include <stdlib.h>
#include <string.h>

/* Totals are what torch.cuda.get_device_properties reports; contexts are estimates, the same in every process. */
static const Model MODELS[] = {
    {"a100", "NVIDIA A100-SXM4-40GB", 8, 0, 108, 2048, 32, 167936, 166912, 41943040, 5120, 1410000, 40441 * MIB, 423 * MIB},
    {"h100", "NVIDIA H100 80GB HBM3", 9, 0, 132, 2048, 32, 233472, 232448, 52428800, 5120, 1980000, 81082 * MIB, 519 * MIB},
    {"l4", "NVIDIA L4", 8, 9, 58, 1536, 24, 102400, 101376, 50331648, 192, 2040000, 22563 * MIB, 300 * MIB},
    {"t4", "Tesla T4", 7, 5, 40, 1024, 16, 65536, 65536, 4194304, 256, 1590000, 14912 * MIB, 180 * MIB},
};

Model model;
int device_count = 1, tenant_count, reads_are_zero = 1;
size_t used[MAX_DEVICES], peak[MAX_DEVICES];
Tenant tenants[MAX_TENANTS];
unsigned long long launches, mallocs, frees, refusals;
PlannedFailure memory_failure, launch_failure;
pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
_Thread_local int current_device;

static size_t read_number(const char *name, size_t otherwise) {
    const char *text = getenv(name);
    return text && *text ? strtoull(text, NULL, 0) : otherwise;
}

__attribute__((constructor)) static void begin(void) {
    const char *key = getenv("STANDIN_CARD");
    model = MODELS[0];
    for (size_t i = 0; key && i < sizeof MODELS / sizeof *MODELS; i++)
        if (!strcmp(MODELS[i].key, key)) model = MODELS[i];
    model.total = read_number("STANDIN_TOTAL", model.total);
    device_count = (int)read_number("STANDIN_DEVICES", 1);
    if (device_count > MAX_DEVICES) device_count = MAX_DEVICES;
    make_address_space();
}

int is_due(PlannedFailure *failure) {
    unsigned long long now = ++failure->seen;
    return failure->first && now >= failure->first && now - failure->first < failure->count;
}

size_t bytes_of_tenants(void) {
    size_t sum = 0;
    for (int i = 0; i < tenant_count; i++) sum += tenants[i].bytes;
    return sum;
}

int take(int device, size_t size) {
    if (is_due(&memory_failure) || model.context + bytes_of_tenants() + used[device] + size > model.total) {
        refusals++;
        return 0;
    }
    used[device] += size;
    if (used[device] > peak[device]) peak[device] = used[device];
    return 1;
}

EXPORT void standin_counts(unsigned long long *out) {
    out[0] = launches, out[1] = mallocs, out[2] = frees, out[3] = refusals, out[4] = used[0], out[5] = peak[0];
}
EXPORT void standin_fail_memory(unsigned long long first, unsigned long long count) {
    memory_failure = (PlannedFailure){first, count, 0, 0};
}
EXPORT void standin_fail_launch(unsigned long long first, unsigned long long count, int code) {
    launch_failure = (PlannedFailure){first, count, 0, code};
}
EXPORT unsigned long long standin_memory_calls(void) { return memory_failure.seen; }
EXPORT unsigned long long standin_launch_calls(void) { return launch_failure.seen; }
EXPORT void standin_zero_reads(int whether) { reads_are_zero = whether; }
EXPORT void standin_set_tenant(unsigned pid, size_t bytes) {
    tenants[0] = (Tenant){pid, bytes};
    tenant_count = bytes ? 1 : 0;
}

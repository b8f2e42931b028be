/* NVML: the cards, their memory, and the processes on them. */
#define _GNU_SOURCE
#include "card.h"
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define SUCCESS 0
#define INVALID_ARGUMENT 2
#define NOT_SUPPORTED 3
#define NOT_FOUND 6
#define INSUFFICIENT_SIZE 7

EXPORT int nvmlInit_v2(void) { return SUCCESS; }
EXPORT int nvmlInitWithFlags(unsigned f) { return SUCCESS; }
EXPORT int nvmlShutdown(void) { return SUCCESS; }
EXPORT const char *nvmlErrorString(int e) { return e ? "Not Found" : "Success"; }
EXPORT int nvmlDeviceGetCount_v2(unsigned *n) {
    *n = (unsigned)device_count;
    return SUCCESS;
}
EXPORT int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **h) {
    if (i >= (unsigned)device_count) return INVALID_ARGUMENT;
    *h = (void *)(uintptr_t)(i + 1);
    return SUCCESS;
}

static void write_uuid(char *text, int device) {
    unsigned char bytes[16];
    fill_uuid((char *)bytes, device);
    text += sprintf(text, "GPU-");
    for (int i = 0; i < 16; i++) text += sprintf(text, i == 4 || i == 6 || i == 8 || i == 10 ? "-%02x" : "%02x", bytes[i]);
}
EXPORT int nvmlDeviceGetHandleByUUID(const char *wanted, void **h) {
    for (int i = 0; i < device_count; i++) {
        char text[64];
        write_uuid(text, i);
        if (!strcmp(text, wanted)) return nvmlDeviceGetHandleByIndex_v2((unsigned)i, h);
    }
    return NOT_FOUND;
}
EXPORT int nvmlDeviceGetHandleByPciBusId_v2(const char *id, void **h) {
    return nvmlDeviceGetHandleByIndex_v2(0, h);
}
EXPORT int nvmlDeviceGetUUID(void *h, char *text, unsigned n) {
    write_uuid(text, (int)(uintptr_t)h - 1);
    return SUCCESS;
}
EXPORT int nvmlDeviceGetName(void *h, char *text, unsigned n) {
    snprintf(text, n, "%s", model.name);
    return SUCCESS;
}
EXPORT int nvmlDeviceGetMemoryInfo(void *h, unsigned long long *m) {
    size_t reserve = 600 * MIB; /* of the driver, which the runtime's total leaves out */
    size_t taken = reserve + model.context + bytes_of_tenants() + used[(uintptr_t)h - 1];
    m[0] = model.total + reserve, m[1] = m[0] > taken ? m[0] - taken : 0, m[2] = taken;
    return SUCCESS;
}

typedef struct { unsigned pid; unsigned long long bytes; unsigned gpu_instance, compute_instance; } Process;
EXPORT int nvmlDeviceGetComputeRunningProcesses_v3(void *h, unsigned *count, Process *found) {
    unsigned capacity = *count;
    *count = (unsigned)tenant_count + 1;
    if (capacity < *count) return INSUFFICIENT_SIZE;
    found[0] = (Process){(unsigned)getpid(), model.context + used[(uintptr_t)h - 1], ~0u, ~0u};
    for (int i = 0; i < tenant_count; i++) found[i + 1] = (Process){tenants[i].pid, tenants[i].bytes, ~0u, ~0u};
    return SUCCESS;
}
EXPORT int nvmlDeviceGetComputeRunningProcesses(void *h, unsigned *count, void *f) {
    *count = 0;
    return SUCCESS;
}
EXPORT int nvmlDeviceGetGraphicsRunningProcesses_v3(void *h, unsigned *count, void *f) {
    *count = 0;
    return SUCCESS;
}
EXPORT int nvmlDeviceGetMPSComputeRunningProcesses_v3(void *h, unsigned *count, void *f) {
    *count = 0;
    return SUCCESS;
}
EXPORT int nvmlSystemGetProcessName(unsigned pid, char *text, unsigned n) {
    snprintf(text, n, "/usr/bin/process-%u", pid);
    return SUCCESS;
}
EXPORT int nvmlSystemGetDriverVersion(char *text, unsigned n) {
    snprintf(text, n, "580.00.00");
    return SUCCESS;
}
EXPORT int nvmlSystemGetNVMLVersion(char *text, unsigned n) {
    snprintf(text, n, "13.580.00");
    return SUCCESS;
}
EXPORT int nvmlSystemGetCudaDriverVersion_v2(int *v) {
    *v = 13000;
    return SUCCESS;
}
EXPORT int nvmlDeviceGetMigMode(void *h, unsigned *now, unsigned *later) { return NOT_SUPPORTED; }
EXPORT int nvmlDeviceGetNvLinkRemoteDeviceType(void *h, unsigned l, void *t) { return NOT_SUPPORTED; }
EXPORT int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *h, unsigned l, void *p) { return NOT_SUPPORTED; }
EXPORT int nvmlDeviceGetGpuFabricInfoV(void *h, void *p) { return SUCCESS; } /* state 0: not supported */

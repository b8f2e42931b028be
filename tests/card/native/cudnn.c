/* cuDNN without a card: its own heuristics and plans are asked through its documented description of a device (cuDNN 9.8
 * and later), where torch gives a handle. Workspaces are those that cuDNN names; nothing is executed. Recurrent layers
 * have none.
 */
#define _GNU_SOURCE
#include "card.h"
#include <cudnn.h>
#include <cudnn_graph.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef cudnnBackendDescriptor_t Descriptor;
typedef cudnnBackendAttributeName_t Name;

static void *library(void) {
    static void *handle;
    if (!handle) handle = dlopen("libcudnn.so.9", RTLD_LAZY | RTLD_NOLOAD);
    if (!handle) handle = dlopen("libcudnn.so.9", RTLD_LAZY);
    return handle;
}
#define REAL(name)                                                                 \
    ({                                                                             \
        static __typeof__(&name) real;                                             \
        if (!real) real = (__typeof__(&name))dlsym(library(), #name);              \
        real;                                                                      \
    })

/* Of which type each descriptor is; only those that need a device are remembered. */
#define MOST_REMEMBERED 4096
static struct { Descriptor descriptor; cudnnBackendDescriptorType_t type; } remembered[MOST_REMEMBERED];
static int remembered_count;
static pthread_mutex_t remembered_lock = PTHREAD_MUTEX_INITIALIZER;

static void remember(Descriptor descriptor, cudnnBackendDescriptorType_t type) {
    pthread_mutex_lock(&remembered_lock);
    if (remembered_count < MOST_REMEMBERED) {
        remembered[remembered_count].descriptor = descriptor;
        remembered[remembered_count++].type = type;
    }
    pthread_mutex_unlock(&remembered_lock);
}

static int type_of(Descriptor descriptor) { /* -1 for one that needs no device */
    int found = -1;
    pthread_mutex_lock(&remembered_lock);
    for (int i = 0; i < remembered_count; i++)
        if (remembered[i].descriptor == descriptor) found = (int)remembered[i].type;
    pthread_mutex_unlock(&remembered_lock);
    return found;
}

static void forget(Descriptor descriptor) {
    pthread_mutex_lock(&remembered_lock);
    for (int i = 0; i < remembered_count; i++)
        if (remembered[i].descriptor == descriptor) {
            remembered[i] = remembered[--remembered_count];
            break;
        }
    pthread_mutex_unlock(&remembered_lock);
}

static void write_description(char *json, size_t size) {
    snprintf(json, size,
             "{\"deviceVer\": %d, \"driverVer\": 13000, \"cudaDeviceId\": 0, \"totalGlobalMem\": %zu, "
             "\"maxGridSize\": [2147483647, 65535, 65535], \"maxBlockSize\": [1024, 1024, 64], \"regsPerBlock\": 65536, "
             "\"multiProcessorCount\": %d, \"warpSize\": 32, \"maxSharedMemoryPerBlock\": 49152, "
             "\"maxSharedMemoryPerBlockOptin\": %d, \"reservedSharedMemoryPerBlock\": 1024, "
             "\"maxRegistersPerSM\": 65536, \"maxCtasPerSM\": %d, \"maxThreadsPerBlock\": 1024, "
             "\"maxThreadsPerSM\": %d, \"pciDeviceId\": 0, \"isTccDriver\": 0, \"supportCoopLaunch\": 1, "
             "\"smClockRateKHz\": %d, \"memClockRateKHz\": 1593000, \"l2CacheSize\": %d, \"deviceName\": \"%s\"}",
             model.major * 100 + model.minor * 10, model.total, model.multiprocessors, model.shared_opt_in,
             model.blocks_per_multiprocessor, model.threads_per_multiprocessor, model.clock_khz, model.l2_cache,
             model.name);
}

static Descriptor make_device_properties(void) {
    static Descriptor made;
    if (made) return made;
    char json[2048];
    write_description(json, sizeof json);
    int failed = REAL(cudnnBackendCreateDescriptor)(CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR, &made) ||
                 REAL(cudnnBackendSetAttribute)(made, CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION, CUDNN_TYPE_CHAR,
                                                (int64_t)strlen(json) + 1, json) ||
                 REAL(cudnnBackendFinalize)(made);
    if (failed) fprintf(stderr, "stand-in card: cuDNN does not take its description\n");
    return made;
}

EXPORT cudnnStatus_t cudnnCreate(cudnnHandle_t *handle) {
    *handle = calloc(1, 64);
    return CUDNN_STATUS_SUCCESS;
}
EXPORT cudnnStatus_t cudnnDestroy(cudnnHandle_t handle) { return CUDNN_STATUS_SUCCESS; }
EXPORT cudnnStatus_t cudnnSetStream(cudnnHandle_t handle, cudaStream_t stream) {
    *(cudaStream_t *)handle = stream;
    return CUDNN_STATUS_SUCCESS;
}
EXPORT cudnnStatus_t cudnnGetStream(cudnnHandle_t handle, cudaStream_t *stream) {
    *stream = *(cudaStream_t *)handle;
    return CUDNN_STATUS_SUCCESS;
}

EXPORT cudnnStatus_t cudnnBackendCreateDescriptor(cudnnBackendDescriptorType_t type, Descriptor *descriptor) {
    cudnnStatus_t status = REAL(cudnnBackendCreateDescriptor)(type, descriptor);
    int needs_device = type == CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR || type == CUDNN_BACKEND_ENGINE_DESCRIPTOR ||
                       type == CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR;
    if (!status && needs_device) remember(*descriptor, type);
    return status;
}
EXPORT cudnnStatus_t cudnnBackendDestroyDescriptor(Descriptor descriptor) {
    forget(descriptor);
    return REAL(cudnnBackendDestroyDescriptor)(descriptor);
}
EXPORT cudnnStatus_t cudnnBackendSetAttribute(Descriptor descriptor, Name name, cudnnBackendAttributeType_t type,
                                              int64_t count, const void *value) {
    int is_handle = name == CUDNN_ATTR_OPERATIONGRAPH_HANDLE || name == CUDNN_ATTR_EXECUTION_PLAN_HANDLE;
    return is_handle ? CUDNN_STATUS_SUCCESS : REAL(cudnnBackendSetAttribute)(descriptor, name, type, count, value);
}
EXPORT cudnnStatus_t cudnnBackendFinalize(Descriptor descriptor) {
    int type = type_of(descriptor);
    if (type >= 0) {
        Descriptor properties = make_device_properties();
        Name name = type == CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR ? CUDNN_ATTR_ENGINEHEUR_DEVICEPROP
                    : type == CUDNN_BACKEND_ENGINE_DESCRIPTOR   ? CUDNN_ATTR_ENGINE_DEVICEPROP
                                                                : CUDNN_ATTR_EXECUTION_PLAN_DEVICEPROP;
        REAL(cudnnBackendSetAttribute)(descriptor, name, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &properties);
    }
    return REAL(cudnnBackendFinalize)(descriptor);
}
EXPORT cudnnStatus_t cudnnBackendExecute(cudnnHandle_t handle, Descriptor plan, Descriptor pack) {
    return CUDNN_STATUS_SUCCESS;
}

EXPORT cudnnStatus_t cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(
    cudnnHandle_t h, cudnnBatchNormMode_t m, cudnnBatchNormOps_t o, const cudnnTensorDescriptor_t x,
    const cudnnTensorDescriptor_t z, const cudnnTensorDescriptor_t y, const cudnnTensorDescriptor_t b,
    const cudnnActivationDescriptor_t a, size_t *size) {
    *size = 0;
    return CUDNN_STATUS_SUCCESS;
}
EXPORT cudnnStatus_t cudnnGetBatchNormalizationBackwardExWorkspaceSize(
    cudnnHandle_t h, cudnnBatchNormMode_t m, cudnnBatchNormOps_t o, const cudnnTensorDescriptor_t x,
    const cudnnTensorDescriptor_t y, const cudnnTensorDescriptor_t dy, const cudnnTensorDescriptor_t dz,
    const cudnnTensorDescriptor_t dx, const cudnnTensorDescriptor_t d, const cudnnActivationDescriptor_t a,
    size_t *size) {
    *size = 0;
    return CUDNN_STATUS_SUCCESS;
}
EXPORT cudnnStatus_t cudnnGetBatchNormalizationTrainingExReserveSpaceSize(cudnnHandle_t h, cudnnBatchNormMode_t m,
                                                                          cudnnBatchNormOps_t o,
                                                                          const cudnnActivationDescriptor_t a,
                                                                          const cudnnTensorDescriptor_t x,
                                                                          size_t *size) {
    *size = 0;
    return CUDNN_STATUS_SUCCESS;
}

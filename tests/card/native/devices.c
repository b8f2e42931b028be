/* Devices as the runtime and the driver describe them, and the last error. */
#define _GNU_SOURCE
#include "card.h"
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static _Thread_local cudaError_t last_error;

cudaError_t fail(cudaError_t error) {
    last_error = error;
    return error;
}

void fill_uuid(char *bytes, int device) {
    static const unsigned char base[16] = {0x5e, 0xed, 0x00, 0x00, 0xca, 0xfe, 0x4c, 0x0d, 0xa0, 0, 0, 0, 0, 0, 0, 0};
    memcpy(bytes, base, 16);
    bytes[15] = (char)(device + 1);
}

EXPORT cudaError_t cudaGetDeviceCount(int *count) {
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    *count = visible && (!*visible || !strcmp(visible, "-1")) ? 0 : device_count;
    return *count ? cudaSuccess : fail(cudaErrorNoDevice);
}
EXPORT cudaError_t cudaGetDevice(int *device) { *device = current_device; return cudaSuccess; }
EXPORT cudaError_t cudaSetDevice(int device) {
    if (device < 0 || device >= device_count) return fail(cudaErrorInvalidDevice);
    current_device = device;
    return cudaSuccess;
}
EXPORT cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int device) {
    memset(p, 0, sizeof *p);
    strcpy(p->name, model.name);
    fill_uuid(p->uuid.bytes, device);
    p->totalGlobalMem = model.total;
    p->sharedMemPerBlock = 49152;
    p->regsPerBlock = p->regsPerMultiprocessor = 65536;
    p->warpSize = 32;
    p->memPitch = 2147483647;
    p->maxThreadsPerBlock = p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
    p->maxThreadsDim[2] = 64;
    p->maxGridSize[0] = 2147483647;
    p->maxGridSize[1] = p->maxGridSize[2] = 65535;
    p->totalConstMem = 65536;
    p->major = model.major;
    p->minor = model.minor;
    p->textureAlignment = p->surfaceAlignment = 512;
    p->texturePitchAlignment = 32;
    p->multiProcessorCount = model.multiprocessors;
    p->canMapHostMemory = p->concurrentKernels = p->ECCEnabled = p->unifiedAddressing = 1;
    p->pciBusID = device + 1;
    p->asyncEngineCount = 3;
    p->memoryBusWidth = model.bus_width;
    p->l2CacheSize = model.l2_cache;
    p->maxThreadsPerMultiProcessor = model.threads_per_multiprocessor;
    p->streamPrioritiesSupported = p->globalL1CacheSupported = p->localL1CacheSupported = p->managedMemory = 1;
    p->sharedMemPerMultiprocessor = model.shared_per_multiprocessor;
    p->concurrentManagedAccess = p->computePreemptionSupported = p->canUseHostPointerForRegisteredMem = 1;
    p->cooperativeLaunch = p->hostRegisterSupported = p->memoryPoolsSupported = 1;
    p->sharedMemPerBlockOptin = model.shared_opt_in;
    p->maxBlocksPerMultiProcessor = model.blocks_per_multiprocessor;
    p->reservedSharedMemPerBlock = 1024;
    p->clusterLaunch = model.major >= 9;
    return cudaSuccess;
}

static int attribute(int which, int device) {
    switch (which) {
        case cudaDevAttrMaxThreadsPerBlock: case cudaDevAttrMaxBlockDimX: case cudaDevAttrMaxBlockDimY: return 1024;
        case cudaDevAttrMaxBlockDimZ: return 64;
        case cudaDevAttrMaxGridDimX: return 2147483647;
        case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: return 65535;
        case cudaDevAttrMaxSharedMemoryPerBlock: return 49152;
        case cudaDevAttrTotalConstantMemory: return 65536;
        case cudaDevAttrWarpSize: return 32;
        case cudaDevAttrMaxRegistersPerBlock: case cudaDevAttrMaxRegistersPerMultiprocessor: return 65536;
        case cudaDevAttrClockRate: return model.clock_khz;
        case cudaDevAttrMultiProcessorCount: return model.multiprocessors;
        case cudaDevAttrTextureAlignment: case cudaDevAttrSurfaceAlignment: return 512;
        case cudaDevAttrPciBusId: return device + 1;
        case cudaDevAttrGlobalMemoryBusWidth: return model.bus_width;
        case cudaDevAttrMemoryClockRate: return 1593000;
        case cudaDevAttrL2CacheSize: return model.l2_cache;
        case cudaDevAttrMaxThreadsPerMultiProcessor: return model.threads_per_multiprocessor;
        case cudaDevAttrAsyncEngineCount: return 3;
        case cudaDevAttrComputeCapabilityMajor: return model.major;
        case cudaDevAttrComputeCapabilityMinor: return model.minor;
        case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return model.shared_per_multiprocessor;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin: return model.shared_opt_in;
        case cudaDevAttrMaxBlocksPerMultiprocessor: return model.blocks_per_multiprocessor;
        case cudaDevAttrReservedSharedMemoryPerBlock: return 1024;
        case cudaDevAttrMaxPitch: return 2147483647;
        case cudaDevAttrGpuOverlap: case cudaDevAttrCanMapHostMemory: case cudaDevAttrConcurrentKernels:
        case cudaDevAttrUnifiedAddressing: case cudaDevAttrStreamPrioritiesSupported: case cudaDevAttrManagedMemory:
        case cudaDevAttrGlobalL1CacheSupported: case cudaDevAttrLocalL1CacheSupported: case cudaDevAttrEccEnabled:
        case cudaDevAttrComputePreemptionSupported: case cudaDevAttrCooperativeLaunch: case cudaDevAttrHostRegisterSupported:
        case cudaDevAttrMemoryPoolsSupported: case CU_DEVICE_ATTRIBUTE_VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED:
        case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED: return 1;
        case cudaDevAttrClusterLaunch: return model.major >= 9;
        default: return 0;
    }
}

EXPORT cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr which, int device) {
    *value = attribute((int)which, device);
    return cudaSuccess;
}
EXPORT CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute which, CUdevice device) {
    *value = attribute((int)which, device);
    return CUDA_SUCCESS;
}
EXPORT CUresult cuDeviceGet(CUdevice *device, int ordinal) { *device = ordinal; return 0; }
EXPORT CUresult cuDeviceGetCount(int *count) { return cudaGetDeviceCount(count) ? CUDA_ERROR_NO_DEVICE : CUDA_SUCCESS; }
EXPORT CUresult cuDriverGetVersion(int *version) { *version = 13000; return 0; }

static int contexts[MAX_DEVICES]; /* only their addresses are used */
EXPORT CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
    *flags = 0;
    *active = 1;
    return CUDA_SUCCESS;
}
EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    *context = (CUcontext)&contexts[device];
    return CUDA_SUCCESS;
}
EXPORT CUresult cuCtxGetCurrent(CUcontext *context) { return cuDevicePrimaryCtxRetain(context, current_device); }
EXPORT CUresult cuGetErrorString(CUresult error, const char **text) {
    *text = error == CUDA_ERROR_OUT_OF_MEMORY ? "out of memory" : "unknown error";
    return CUDA_SUCCESS;
}
EXPORT CUresult cuPointerGetAttribute(void *value, CUpointer_attribute which, CUdeviceptr pointer) {
    if (which == CU_POINTER_ATTRIBUTE_CONTEXT) *(void **)value = &contexts[0];
    else if (which == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL) *(int *)value = device_of((void *)pointer);
    else *(unsigned long long *)value = pointer;
    return CUDA_SUCCESS;
}

EXPORT cudaError_t cudaDriverGetVersion(int *version) { *version = 13000; return 0; }
EXPORT cudaError_t cudaRuntimeGetVersion(int *version) { *version = 13000; return 0; }
EXPORT cudaError_t cudaDeviceGetPCIBusId(char *text, int size, int device) {
    snprintf(text, (size_t)size, "00000000:%02X:00.0", device + 1);
    return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceCanAccessPeer(int *can, int a, int b) { *can = a != b; return 0; }
EXPORT cudaError_t cudaDeviceSynchronize(void) { return 0; }
EXPORT cudaError_t cudaGetLastError(void) {
    cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}
EXPORT cudaError_t cudaPeekAtLastError(void) { return last_error; }
EXPORT const char *cudaGetErrorName(cudaError_t error) {
    switch (error) {
        case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
        case cudaErrorNoDevice: return "cudaErrorNoDevice";
        default: return "cudaError";
    }
}
EXPORT const char *cudaGetErrorString(cudaError_t error) {
    switch (error) {
        case cudaSuccess: return "no error";
        case cudaErrorMemoryAllocation: return "out of memory";
        case cudaErrorNoDevice: return "no CUDA-capable device is detected";
        case cudaErrorInvalidDevice: return "invalid device ordinal";
        default: return "unknown error";
    }
}

static int nothing(void) { return 0; }
EXPORT cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
                                                    unsigned long long flags,
                                                    enum cudaDriverEntryPointQueryResult *found) {
    *function = dlsym(RTLD_DEFAULT, name);
    if (!*function) *function = (void *)nothing;
    if (found) *found = cudaDriverEntryPointSuccess;
    return 0;
}

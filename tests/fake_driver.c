// SPDX-License-Identifier: Apache-2.0
// A libcuda.so.1 that launches nothing and keeps what it was last asked to launch. With it Triton's
// launchers and that of direct.c run where there is no GPU, and can be compared word by word.

#include <cuda.h>
#include <string.h>

enum { MOST = 64 };

static size_t sizes[MOST];  // of the parameters of launches to come, in bytes
static int n_sizes;
static unsigned long long last[2 * MOST];
static int n_last, failing;
static CUcontext bound = (CUcontext)1;

// --- what the test asks for -------------------------------------------------------------------

void expect(int n, const size_t *given) {
    memcpy(sizes, given, n * sizeof *given);
    n_sizes = n;
}

// The number of words of the last launch, which are copied; then there is none.
int take(unsigned long long *words) {
    int n = n_last;
    memcpy(words, last, n * sizeof *last);
    n_last = 0;
    return n;
}

void fail(int result) { failing = result; }

void bind(unsigned long long context) { bound = (CUcontext)context; }

// --- the driver ---------------------------------------------------------------------------------

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **parameters,
                          void **extra) {
    if (failing) return failing;
    int n = 0;
    last[n++] = (unsigned long long)function;
    last[n++] = (unsigned long long)bound;
    last[n++] = (unsigned long long)extra;
    last[n++] = config->gridDimX;
    last[n++] = config->gridDimY;
    last[n++] = config->gridDimZ;
    last[n++] = config->blockDimX;
    last[n++] = config->blockDimY;
    last[n++] = config->blockDimZ;
    last[n++] = config->sharedMemBytes;
    last[n++] = (unsigned long long)config->hStream;
    last[n++] = config->numAttrs;
    for (unsigned i = 0; i < config->numAttrs; i++) {
        last[n++] = config->attrs[i].id;
        last[n++] = config->attrs[i].value.programmaticStreamSerializationAllowed;
    }
    for (int i = 0; i < n_sizes; i++) {
        last[n] = 0;
        memcpy(&last[n++], parameters[i], sizes[i]);
    }
    n_last = n;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *context) {
    *context = bound;
    return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext context) {
    bound = context;
    return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult result, const char **text) {
    *text = "as the test wants it";
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    *context = (CUcontext)1;
    return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
    *function = (CUfunction)module;
    return CUDA_SUCCESS;
}

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
    *module = (CUmodule)(0x1000 + (size_t)image % 0x1000);
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    *value = 227 * 1024;
    return CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
    *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
    return CUDA_SUCCESS;
}

CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr pointer) {
    *(CUdeviceptr *)data = pointer;
    return CUDA_SUCCESS;
}

// What Triton's modules refer to besides.
#define NOTHING(name, ...) CUresult name(__VA_ARGS__) { return CUDA_SUCCESS; }
NOTHING(cuCtxGetDevice, CUdevice *device)
NOTHING(cuCtxGetLimit, size_t *value, CUlimit limit)
NOTHING(cuCtxSetLimit, CUlimit limit, size_t value)
NOTHING(cuDeviceGet, CUdevice *device, int ordinal)
NOTHING(cuDriverGetVersion, int *version)
NOTHING(cuFuncSetAttribute, CUfunction function, CUfunction_attribute attribute, int value)
NOTHING(cuFuncSetCacheConfig, CUfunction function, CUfunc_cache config)
NOTHING(cuModuleUnload, CUmodule module)
NOTHING(cuStreamIsCapturing, CUstream stream, CUstreamCaptureStatus *status)

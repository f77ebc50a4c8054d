#include <cstring>
#include <vector>

#include "tests/fakes/fake_cuda/fake.h"

namespace fake_cuda {
namespace {

thread_local std::vector<CUctx_st*> contexts;  ///< the last is current

bool exists(CUdevice device) { return device >= 0 && static_cast<std::size_t>(device) < visible_gpus().size(); }

struct Named {
    CUresult error;
    const char* name;
    const char* text;
};
constexpr std::array<Named, 12> names{{
    {CUDA_SUCCESS, "CUDA_SUCCESS", "no error"},
    {CUDA_ERROR_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {CUDA_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {CUDA_ERROR_DEINITIALIZED, "CUDA_ERROR_DEINITIALIZED", "driver shutting down"},
    {CUDA_ERROR_NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {CUDA_ERROR_INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {CUDA_ERROR_INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {CUDA_ERROR_OPERATING_SYSTEM, "CUDA_ERROR_OPERATING_SYSTEM",
     "OS call failed or operation not supported on this OS"},
    {CUDA_ERROR_INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {CUDA_ERROR_NOT_READY, "CUDA_ERROR_NOT_READY", "device not ready"},
    {CUDA_ERROR_ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {CUDA_ERROR_NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
}};

const Named* find(CUresult error) {
    for (const Named& named : names)
        if (named.error == error) return &named;
    return nullptr;
}

}  // namespace

CUctx_st* current() { return contexts.empty() ? nullptr : contexts.back(); }

}  // namespace fake_cuda

using namespace fake_cuda;

FAKE_CUDA_EXPORT CUresult cuInit(unsigned) {
    FAKE_CUDA_ENTER();
    return visible_gpus().empty() ? CUDA_ERROR_NO_DEVICE : CUDA_SUCCESS;
}

FAKE_CUDA_EXPORT CUresult cuDriverGetVersion(int* version) {
    *version = 13000;
    return CUDA_SUCCESS;
}

FAKE_CUDA_EXPORT CUresult cuGetErrorName(CUresult error, const char** text) {
    const Named* named = find(error);
    *text = named == nullptr ? nullptr : named->name;
    return named == nullptr ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

FAKE_CUDA_EXPORT CUresult cuGetErrorString(CUresult error, const char** text) {
    const Named* named = find(error);
    *text = named == nullptr ? nullptr : named->text;
    return named == nullptr ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

FAKE_CUDA_EXPORT CUresult cuDeviceGetCount(int* count) {
    FAKE_CUDA_ENTER();
    *count = static_cast<int>(visible_gpus().size());
    return CUDA_SUCCESS;
}

FAKE_CUDA_EXPORT CUresult cuDeviceGet(CUdevice* device, int ordinal) {
    FAKE_CUDA_ENTER();
    if (!exists(ordinal)) return CUDA_ERROR_INVALID_DEVICE;
    *device = ordinal;
    return CUDA_SUCCESS;
}

FAKE_CUDA_EXPORT CUresult cuDeviceGetUuid_v2(CUuuid* uuid, CUdevice device) {
    FAKE_CUDA_ENTER();
    if (!exists(device)) return CUDA_ERROR_INVALID_DEVICE;
    uuid->bytes = visible_gpus()[static_cast<std::size_t>(device)];
    return CUDA_SUCCESS;
}

FAKE_CUDA_EXPORT CUresult cuDeviceGetName(char* name, int bytes, CUdevice device) {
    FAKE_CUDA_ENTER();
    if (!exists(device) || bytes <= 0) return CUDA_ERROR_INVALID_DEVICE;
    std::strncpy(name, "Fake GPU", static_cast<std::size_t>(bytes));
    name[bytes - 1] = '\0';
    return CUDA_SUCCESS;
}

FAKE_CUDA_EXPORT CUresult cuDeviceGetAttribute(int* value, int attribute, CUdevice device) {
    FAKE_CUDA_ENTER();
    if (!exists(device)) return CUDA_ERROR_INVALID_DEVICE;
    *value = lacks(attribute) ? 0 : 1;
    return CUDA_SUCCESS;
}

FAKE_CUDA_EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
    FAKE_CUDA_ENTER();
    if (!exists(device)) return CUDA_ERROR_INVALID_DEVICE;
    *context = &primary_context(device);
    ++(*context)->references;
    return CUDA_SUCCESS;
}

FAKE_CUDA_EXPORT CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
    FAKE_CUDA_ENTER();
    if (!exists(device)) return CUDA_ERROR_INVALID_DEVICE;
    if (primary_context(device).references == 0) return CUDA_ERROR_INVALID_CONTEXT;
    --primary_context(device).references;
    return CUDA_SUCCESS;
}

FAKE_CUDA_EXPORT CUresult cuCtxPushCurrent_v2(CUcontext context) {
    FAKE_CUDA_ENTER();
    if (context == nullptr || context->references == 0) return CUDA_ERROR_INVALID_CONTEXT;
    contexts.push_back(context);
    return CUDA_SUCCESS;
}

FAKE_CUDA_EXPORT CUresult cuCtxPopCurrent_v2(CUcontext* context) {
    FAKE_CUDA_ENTER();
    if (contexts.empty()) return CUDA_ERROR_INVALID_CONTEXT;
    *context = contexts.back();
    contexts.pop_back();
    return CUDA_SUCCESS;
}

FAKE_CUDA_EXPORT CUresult cuCtxSetCurrent(CUcontext context) {
    FAKE_CUDA_ENTER();
    if (!contexts.empty()) contexts.pop_back();
    if (context != nullptr) contexts.push_back(context);
    return CUDA_SUCCESS;
}

FAKE_CUDA_EXPORT CUresult cuCtxGetCurrent(CUcontext* context) {
    FAKE_CUDA_ENTER();
    *context = current();
    return CUDA_SUCCESS;
}

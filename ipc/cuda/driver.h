#pragma once

#include <cstddef>
#include <string_view>

#include "ipc/base/error.h"
#include "ipc/cuda/driver_types.h"

namespace bulkhead::cuda {

/// Every driver function in use, with the symbol that has this signature: `_v2` if cuda.h
/// renames it so.
// clang-format off
#define BULKHEAD_CUDA_FUNCTIONS(F)                                                                                \
    F(cuInit, "cuInit", unsigned flags)                                                                           \
    F(cuGetErrorName, "cuGetErrorName", CUresult error, const char** text)                                        \
    F(cuGetErrorString, "cuGetErrorString", CUresult error, const char** text)                                    \
    F(cuDeviceGetCount, "cuDeviceGetCount", int* count)                                                           \
    F(cuDeviceGet, "cuDeviceGet", CUdevice* device, int ordinal)                                                  \
    F(cuDeviceGetUuid, "cuDeviceGetUuid_v2", CUuuid* uuid, CUdevice device)                                       \
    F(cuDeviceGetAttribute, "cuDeviceGetAttribute", int* value, int attribute, CUdevice device)                   \
    F(cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain", CUcontext* context, CUdevice device)                  \
    F(cuDevicePrimaryCtxRelease, "cuDevicePrimaryCtxRelease_v2", CUdevice device)                                 \
    F(cuCtxPushCurrent, "cuCtxPushCurrent_v2", CUcontext context)                                                 \
    F(cuCtxPopCurrent, "cuCtxPopCurrent_v2", CUcontext* context)                                                  \
    F(cuCtxSynchronize, "cuCtxSynchronize")                                                                       \
    F(cuMemAlloc, "cuMemAlloc_v2", CUdeviceptr* pointer, std::size_t bytes)                                       \
    F(cuMemFree, "cuMemFree_v2", CUdeviceptr pointer)                                                             \
    F(cuMemGetAllocationGranularity, "cuMemGetAllocationGranularity", std::size_t* bytes,                         \
      const CUmemAllocationProp* properties, int option)                                                          \
    F(cuMemCreate, "cuMemCreate", CUmemGenericAllocationHandle* handle, std::size_t bytes,                        \
      const CUmemAllocationProp* properties, unsigned long long flags)                                            \
    F(cuMemRelease, "cuMemRelease", CUmemGenericAllocationHandle handle)                                          \
    F(cuMemAddressReserve, "cuMemAddressReserve", CUdeviceptr* pointer, std::size_t bytes, std::size_t alignment, \
      CUdeviceptr wanted, unsigned long long flags)                                                               \
    F(cuMemAddressFree, "cuMemAddressFree", CUdeviceptr pointer, std::size_t bytes)                               \
    F(cuMemMap, "cuMemMap", CUdeviceptr pointer, std::size_t bytes, std::size_t offset,                           \
      CUmemGenericAllocationHandle handle, unsigned long long flags)                                              \
    F(cuMemUnmap, "cuMemUnmap", CUdeviceptr pointer, std::size_t bytes)                                           \
    F(cuMemSetAccess, "cuMemSetAccess", CUdeviceptr pointer, std::size_t bytes, const CUmemAccessDesc* access,    \
      std::size_t count)                                                                                          \
    F(cuMemExportToShareableHandle, "cuMemExportToShareableHandle", void* shareable,                              \
      CUmemGenericAllocationHandle handle, int type, unsigned long long flags)                                    \
    F(cuMemImportFromShareableHandle, "cuMemImportFromShareableHandle", CUmemGenericAllocationHandle* handle,     \
      void* shareable, int type)                                                                                  \
    F(cuIpcGetMemHandle, "cuIpcGetMemHandle", CUipcMemHandle* handle, CUdeviceptr pointer)                        \
    F(cuIpcOpenMemHandle, "cuIpcOpenMemHandle_v2", CUdeviceptr* pointer, CUipcMemHandle handle, unsigned flags)   \
    F(cuIpcCloseMemHandle, "cuIpcCloseMemHandle", CUdeviceptr pointer)                                            \
    F(cuIpcGetEventHandle, "cuIpcGetEventHandle", CUipcEventHandle* handle, CUevent event)                        \
    F(cuIpcOpenEventHandle, "cuIpcOpenEventHandle", CUevent* event, CUipcEventHandle handle)                      \
    F(cuEventCreate, "cuEventCreate", CUevent* event, unsigned flags)                                             \
    F(cuEventDestroy, "cuEventDestroy_v2", CUevent event)                                                         \
    F(cuEventRecord, "cuEventRecord", CUevent event, CUstream stream)                                             \
    F(cuStreamCreate, "cuStreamCreate", CUstream* stream, unsigned flags)                                         \
    F(cuStreamDestroy, "cuStreamDestroy_v2", CUstream stream)                                                     \
    F(cuStreamSynchronize, "cuStreamSynchronize", CUstream stream)                                                \
    F(cuStreamWaitEvent, "cuStreamWaitEvent", CUstream stream, CUevent event, unsigned flags)                     \
    F(cuMemcpyAsync, "cuMemcpyAsync", CUdeviceptr target, CUdeviceptr source, std::size_t bytes, CUstream stream) \
    F(cuMemsetD8Async, "cuMemsetD8Async", CUdeviceptr target, unsigned char value, std::size_t bytes,             \
      CUstream stream)                                                                                            \
    F(cuLaunchHostFunc, "cuLaunchHostFunc", CUstream stream, CUhostFn function, void* user_data)
// clang-format on

/// NVIDIA's driver, opened at run time: the library of $BULKHEAD_LIBCUDA, else libcuda.so.1. Its
/// functions are members with their names of cuda.h.
///
/// Thread  any
class Driver {
public:
    /// Loads once; later calls return the same result. Never closes the library: its threads and
    /// exit handlers stay.
    /// Errors  load_failed: no library, a missing symbol, or a failure of `cuInit`
    static const Result<const Driver*>& load();

    /// "cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY (out of memory)", as out_of_memory,
    /// resources_exhausted or internal.
    [[nodiscard]] Error failed(std::string_view call, CUresult error) const;
    [[nodiscard]] Result<> check(std::string_view call, CUresult error) const {
        return error == CUDA_SUCCESS ? Result<>{} : Result<>{failed(call, error)};
    }

#define BULKHEAD_CUDA_MEMBER(name, symbol, ...) CUresult (*name)(__VA_ARGS__) = nullptr;
    BULKHEAD_CUDA_FUNCTIONS(BULKHEAD_CUDA_MEMBER)
#undef BULKHEAD_CUDA_MEMBER

private:
    Driver() = default;
    static Result<const Driver*> open();
};

}  // namespace bulkhead::cuda

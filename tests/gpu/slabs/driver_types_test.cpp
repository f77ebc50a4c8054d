// cuda.h and our declarations of it, compared while compiling. In a file of its own, where
// both may be seen.
#if __has_include(<cuda.h>)
#include <cuda.h>
#endif

#include <cstddef>

#include <gtest/gtest.h>

#include "ipc/cuda/driver_types.h"

namespace ours = bulkhead::cuda;

TEST(CudaDriverTypes, AreThoseOfTheToolkit) {
#ifndef CUDA_VERSION
    GTEST_SKIP() << "no CUDA toolkit on this machine: its cuda.h is what they are compared with";
#else
    static_assert(sizeof(ours::CUdeviceptr) == sizeof(::CUdeviceptr));
    static_assert(sizeof(ours::CUuuid) == sizeof(::CUuuid));
    static_assert(sizeof(ours::CUipcMemHandle) == sizeof(::CUipcMemHandle));
    static_assert(sizeof(ours::CUipcEventHandle) == sizeof(::CUipcEventHandle));
    static_assert(sizeof(ours::CUmemGenericAllocationHandle) == sizeof(::CUmemGenericAllocationHandle));
#define SAME_FIELD(type, field) static_assert(offsetof(ours::type, field) == offsetof(::type, field))
    static_assert(sizeof(ours::CUmemAllocationProp) == sizeof(::CUmemAllocationProp));
    SAME_FIELD(CUmemAllocationProp, type);
    SAME_FIELD(CUmemAllocationProp, requestedHandleTypes);
    SAME_FIELD(CUmemAllocationProp, location);
    SAME_FIELD(CUmemAllocationProp, win32HandleMetaData);
    SAME_FIELD(CUmemAllocationProp, allocFlags);
    static_assert(sizeof(ours::CUmemAccessDesc) == sizeof(::CUmemAccessDesc));
    SAME_FIELD(CUmemAccessDesc, location);
    SAME_FIELD(CUmemAccessDesc, flags);
#define SAME_VALUE(name) static_assert(static_cast<int>(ours::name) == static_cast<int>(::name))
    SAME_VALUE(CUDA_ERROR_INVALID_VALUE);
    SAME_VALUE(CUDA_ERROR_OUT_OF_MEMORY);
    SAME_VALUE(CUDA_ERROR_DEINITIALIZED);
    SAME_VALUE(CUDA_ERROR_NO_DEVICE);
    SAME_VALUE(CUDA_ERROR_INVALID_DEVICE);
    SAME_VALUE(CUDA_ERROR_INVALID_CONTEXT);
    SAME_VALUE(CUDA_ERROR_OPERATING_SYSTEM);
    SAME_VALUE(CUDA_ERROR_INVALID_HANDLE);
    SAME_VALUE(CUDA_ERROR_NOT_READY);
    SAME_VALUE(CUDA_ERROR_ILLEGAL_ADDRESS);
    SAME_VALUE(CUDA_ERROR_NOT_SUPPORTED);
    SAME_VALUE(CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING);
    SAME_VALUE(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED);
    SAME_VALUE(CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED);
    SAME_VALUE(CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED);
    SAME_VALUE(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    SAME_VALUE(CU_MEM_ACCESS_FLAGS_PROT_READ);
    SAME_VALUE(CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
    SAME_VALUE(CU_MEM_LOCATION_TYPE_DEVICE);
    SAME_VALUE(CU_MEM_ALLOCATION_TYPE_PINNED);
    SAME_VALUE(CU_MEM_ALLOC_GRANULARITY_RECOMMENDED);
    SAME_VALUE(CU_EVENT_DISABLE_TIMING);
    SAME_VALUE(CU_EVENT_INTERPROCESS);
    SAME_VALUE(CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
    SAME_VALUE(CU_STREAM_NON_BLOCKING);
#endif
}

#pragma once

/// What the parts of the fake driver share. State of the process is never destroyed: streams may
/// run until the end.

#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "ipc/cuda/driver_types.h"

struct bulkhead::cuda::CUctx_st {
    int device;
    std::atomic<int> references{0};
};

namespace fake_cuda {

using namespace bulkhead::cuda;

using Uuid = std::array<char, 16>;

// machine.cpp
[[nodiscard]] const std::vector<Uuid>& visible_gpus();  ///< by ordinal
[[nodiscard]] std::string text(const Uuid& uuid);
[[nodiscard]] bool lacks(int attribute);
[[nodiscard]] CUctx_st& primary_context(int ordinal);

// faults.cpp
/// What this call returns at once; CUDA_SUCCESS: it is carried out.
[[nodiscard]] CUresult injected(const char* function);
/// Holds the driver, as a call that does not return may, if the environment wants that.
[[nodiscard]] std::unique_lock<std::mutex> lock_if_waits_block();
/// An illegal address: every later call of the process fails.
void lose_context();
[[nodiscard]] bool context_is_lost();

// log.cpp
/// Writes down a call, before it does anything: the stream that it was given and what it is about,
/// by a number that all processes have alike: an event's inode, 0 for the rest.
void note(const char* call, const void* stream = nullptr, std::uint64_t object = 0);

// streams.cpp
/// Runs when all that was queued on it before has run; the null stream is one like the others.
[[nodiscard]] CUresult enqueue(CUstream stream, std::function<void()> work);
/// Until all that was queued on any stream has run.
void wait_for_all();

// memory.cpp
/// To be run by a stream. Ranges that lie in no fake allocation are the host's.
void copy(CUdeviceptr target, CUdeviceptr source, std::size_t bytes);
void fill(CUdeviceptr target, unsigned char value, std::size_t bytes);

// driver.cpp
/// The current context; null: none.
[[nodiscard]] CUctx_st* current();

/// What names a memfd of another process, in the 64 bytes of an IPC handle.
struct IpcName {
    std::array<char, 8> magic;  ///< "fakecuda" for memory, "fakeevnt" for an event
    std::int32_t pid;
    std::int32_t fd;
    std::uint64_t inode;  ///< so that a descriptor that was reused is not taken for it
    std::uint64_t size_bytes;
    Uuid gpu;
    std::array<char, 16> unused;
};
static_assert(sizeof(IpcName) == 64);
[[nodiscard]] IpcName name_memfd(const char* magic, int fd, std::uint64_t size_bytes, int device);
/// A descriptor of its own, or the error that the caller returns.
[[nodiscard]] CUresult open_memfd(const char* magic, const IpcName& name, int& fd);

}  // namespace fake_cuda

/// At the head of each exported function.
#define FAKE_CUDA_ENTER()                                                                                              \
    do {                                                                                                               \
        if (const CUresult failure = ::fake_cuda::injected(__func__); failure != 0) return failure;                    \
    } while (false)
#define FAKE_CUDA_NEED_CONTEXT()                                                                                       \
    do {                                                                                                               \
        FAKE_CUDA_ENTER();                                                                                             \
        if (::fake_cuda::current() == nullptr) return CUDA_ERROR_INVALID_CONTEXT;                                      \
        if (::fake_cuda::context_is_lost()) return CUDA_ERROR_ILLEGAL_ADDRESS;                                         \
    } while (false)
#define FAKE_CUDA_EXPORT extern "C" __attribute__((visibility("default")))

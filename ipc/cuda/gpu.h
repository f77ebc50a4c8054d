#pragma once

#include <memory>
#include <string>

#include "ipc/channel/wire.h"
#include "ipc/cuda/driver.h"

namespace bulkhead::cuda {

/// One GPU through its primary context, which the CUDA runtime, and so LibTorch and
/// PyTorch, use too.
///
/// Owns    a reference to the context; the first one in a process costs 100 to 550 MiB
///         of device memory
/// Thread  any; calls make the context current and restore the thread's former one
class Gpu {
public:
    /// `ordinal` counts the GPUs in CUDA_VISIBLE_DEVICES. Errors  load_failed, out_of_memory
    static Result<std::shared_ptr<const Gpu>> open(int ordinal);
    /// Errors  load_failed; input_invalid if no visible GPU has this UUID
    static Result<std::shared_ptr<const Gpu>> open(const wire::GpuUuid& uuid);
    Gpu(const Gpu&) = delete;
    Gpu& operator=(const Gpu&) = delete;
    ~Gpu();

    [[nodiscard]] const wire::GpuUuid& uuid() const noexcept { return uuid_; }
    [[nodiscard]] CUdevice device() const noexcept { return device_; }
    [[nodiscard]] const Driver& driver() const noexcept { return driver_; }
    /// Bits of wire::Feature: the slab kinds this GPU can share. 0 without interprocess events:
    /// tensors could not be handed over in stream order.
    [[nodiscard]] std::uint64_t features() const noexcept { return features_; }

    /// Makes the context current on this thread for a scope.
    class Current {
    public:
        explicit Current(const Gpu& gpu) : driver_{gpu.driver_}, pushed_{driver_.cuCtxPushCurrent(gpu.context_)} {}
        Current(const Current&) = delete;
        Current& operator=(const Current&) = delete;
        ~Current() {
            CUcontext popped = nullptr;
            if (pushed_ == CUDA_SUCCESS) (void)driver_.cuCtxPopCurrent(&popped);
        }

    private:
        const Driver& driver_;
        const CUresult pushed_;  ///< if it failed, the next call fails too and reports it
    };

    /// Waits until all queued work of this process on this GPU is done. For the end of slabs, never
    /// for a hand-over.
    void synchronize() const noexcept;

private:
    Gpu(const Driver& driver, CUdevice device, const wire::GpuUuid& uuid)
        : driver_{driver}, device_{device}, uuid_{uuid} {}
    static Result<std::shared_ptr<const Gpu>> take(const Driver& driver, CUdevice device);

    const Driver& driver_;
    CUdevice device_;
    wire::GpuUuid uuid_;
    CUcontext context_ = nullptr;
    std::uint64_t features_ = 0;
};

/// "GPU-b4efe4ba-…", the spelling of nvidia-smi and CUDA_VISIBLE_DEVICES.
[[nodiscard]] std::string to_string(const wire::GpuUuid& uuid);

}  // namespace bulkhead::cuda

#pragma once

#include <cstdint>
#include <memory>

#include "ipc/cuda/gpu.h"

namespace bulkhead::cuda {

/// Device addresses of this process, kept as long as this lives; a VmmSlab puts memory there.
///
/// Units   size_bytes() is a multiple of the device's granularity, usually 2 MiB; addresses alone cost no memory
/// Thread  any
class AddressRange {
public:
    /// Errors  input_invalid (no byte, or more than there are addresses), out_of_memory
    static Result<std::unique_ptr<const AddressRange>> reserve(std::shared_ptr<const Gpu> gpu,
                                                               std::uint64_t size_bytes);
    AddressRange(const AddressRange&) = delete;
    AddressRange& operator=(const AddressRange&) = delete;
    ~AddressRange();

    [[nodiscard]] CUdeviceptr pointer() const noexcept { return pointer_; }
    [[nodiscard]] std::uint64_t size_bytes() const noexcept { return size_bytes_; }

private:
    AddressRange(std::shared_ptr<const Gpu> gpu, CUdeviceptr pointer, std::uint64_t size_bytes)
        : gpu_{std::move(gpu)}, pointer_{pointer}, size_bytes_{size_bytes} {}
    std::shared_ptr<const Gpu> gpu_;
    CUdeviceptr pointer_;
    std::uint64_t size_bytes_;
};

/// Memory that can be shared by a file descriptor, as `cuMemCreate` is asked for it.
[[nodiscard]] CUmemAllocationProp shareable_on(const Gpu& gpu);
/// Rounded up to what such memory is allocated in. Errors  input_invalid: no byte, or beyond 64 bits
[[nodiscard]] Result<std::uint64_t> whole_allocation(const Gpu& gpu, std::uint64_t size_bytes);

}  // namespace bulkhead::cuda

#pragma once

#include <cstdint>
#include <memory>

#include "ipc/cuda/gpu.h"

namespace bulkhead::cuda {

/// Reserved device addresses of this process; a VmmSlab maps memory there. Freed on destruction.
///
/// Units   size_bytes() is a multiple of the device's granularity, usually 2 MiB; addresses cost no memory
/// Thread  any
class AddressRange {
public:
    /// Errors  input_invalid (0 bytes, or more than the address space), out_of_memory
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

/// Returns the cuMemCreate properties of memory that can be shared by file descriptor.
[[nodiscard]] CUmemAllocationProp shareable_on(const Gpu& gpu);
/// Rounds up to the allocation granularity of such memory. Errors  input_invalid: 0 bytes, or beyond 64 bits
[[nodiscard]] Result<std::uint64_t> whole_allocation(const Gpu& gpu, std::uint64_t size_bytes);

}  // namespace bulkhead::cuda

#pragma once

#include <cstdint>
#include <memory>

#include "ipc/base/unique_fd.h"
#include "ipc/cuda/address_range.h"
#include "ipc/cuda/gpu.h"

namespace bulkhead::cuda {

enum class Access : std::uint8_t { read_only, read_write };

/// Device memory of the virtual memory API, shared by a file descriptor: a slab of kind cuda_vmm.
///
/// The exporter creates and maps it read-write; whoever imports it maps it with its own access. It lives until the last
/// mapping, handle and descriptor of it are gone, so an exporter's death takes nothing from an importer, and an
/// importer keeps the memory from the device after the exporter's end. No PID namespace is involved.
///
/// Units   size_bytes() is a multiple of the device's granularity, usually 2 MiB
/// Owns    addresses and mapping. The destructor waits for the GPU first: unmapping under running work faults it
/// Thread  any; not synchronised
class VmmSlab {
public:
    /// Errors  out_of_memory, not_permitted (this system shares no such memory), input_invalid (no byte)
    static Result<VmmSlab> create(std::shared_ptr<const Gpu> gpu, std::uint64_t size_bytes);

    /// The descriptor is only read, and stays the caller's. A wrong `size_bytes` fails.
    /// Errors  not_permitted (another driver or container), internal (no such memory behind the descriptor)
    static Result<VmmSlab> import(std::shared_ptr<const Gpu> gpu, int fd, std::uint64_t size_bytes, Access access);

    VmmSlab(VmmSlab&&) noexcept = default;
    VmmSlab& operator=(VmmSlab&&) noexcept = default;

    /// A new descriptor of the memory, to be sent as SCM_RIGHTS. For whoever created it.
    [[nodiscard]] Result<UniqueFd> export_fd() const;

    [[nodiscard]] CUdeviceptr pointer() const noexcept { return mapping_->addresses->pointer(); }
    [[nodiscard]] std::uint64_t size_bytes() const noexcept { return mapping_->size_bytes; }
    [[nodiscard]] const std::shared_ptr<const Gpu>& gpu() const noexcept { return mapping_->gpu; }

private:
    struct Mapping {
        std::shared_ptr<const Gpu> gpu;
        std::uint64_t size_bytes = 0;
        CUmemGenericAllocationHandle handle = 0;
        std::unique_ptr<const AddressRange> addresses;
        bool mapped = false;
        Mapping(std::shared_ptr<const Gpu> owner, std::uint64_t bytes) : gpu{std::move(owner)}, size_bytes{bytes} {}
        Mapping(const Mapping&) = delete;
        Mapping& operator=(const Mapping&) = delete;
        ~Mapping();
    };
    explicit VmmSlab(std::unique_ptr<Mapping> mapping) : mapping_{std::move(mapping)} {}
    static Result<VmmSlab> map(std::unique_ptr<Mapping> mapping, Access access);
    std::unique_ptr<Mapping> mapping_;
};

}  // namespace bulkhead::cuda

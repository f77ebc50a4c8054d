#pragma once

#include <cstdint>
#include <memory>

#include "ipc/base/unique_fd.h"
#include "ipc/cuda/gpu.h"

namespace bulkhead::cuda {

enum class Access : std::uint8_t { read_only, read_write };

/// Device memory of CUDA's virtual memory API, shared by a file descriptor: a slab of
/// kind cuda_vmm.
///
/// The exporter creates it and maps it read-write; an importer maps it with its own access. The
/// memory lives until its last mapping, handle and descriptor are gone: an importer survives the
/// exporter's death, and keeps the device memory in use. Works across PID namespaces.
///
/// Units   size_bytes() is a multiple of the device's granularity, usually 2 MiB
/// Owns    addresses and mapping. The destructor first waits for the GPU: unmapping under running
///         work faults it
/// Thread  any; not synchronised
class VmmSlab {
public:
    /// Errors  out_of_memory, not_permitted (this system cannot share such memory),
    ///         input_invalid (0 bytes)
    static Result<VmmSlab> create(std::shared_ptr<const Gpu> gpu, std::uint64_t size_bytes);

    /// The caller keeps the descriptor. Fails if `size_bytes` is wrong.
    /// Errors  not_permitted (another driver or container), internal (no such memory behind
    ///         the descriptor)
    static Result<VmmSlab> import(std::shared_ptr<const Gpu> gpu, int fd, std::uint64_t size_bytes, Access access);

    VmmSlab(VmmSlab&&) noexcept = default;
    VmmSlab& operator=(VmmSlab&&) noexcept = default;

    /// Returns a new descriptor of the memory, to send as SCM_RIGHTS. Call on the
    /// creating side only.
    [[nodiscard]] Result<UniqueFd> export_fd() const;

    [[nodiscard]] CUdeviceptr pointer() const noexcept { return mapping_->pointer; }
    [[nodiscard]] std::uint64_t size_bytes() const noexcept { return mapping_->size_bytes; }
    [[nodiscard]] const std::shared_ptr<const Gpu>& gpu() const noexcept { return mapping_->gpu; }

private:
    struct Mapping {
        std::shared_ptr<const Gpu> gpu;
        std::uint64_t size_bytes;
        CUmemGenericAllocationHandle handle;
        CUdeviceptr pointer = 0;           ///< of reserved addresses; they cost no memory
        std::uint64_t reserved_bytes = 0;  ///< 0: none
        bool mapped = false;
        Mapping(std::shared_ptr<const Gpu> owner, std::uint64_t bytes, CUmemGenericAllocationHandle memory)
            : gpu{std::move(owner)}, size_bytes{bytes}, handle{memory} {}
        Mapping(const Mapping&) = delete;
        Mapping& operator=(const Mapping&) = delete;
        ~Mapping();
    };
    explicit VmmSlab(std::unique_ptr<Mapping> mapping) : mapping_{std::move(mapping)} {}
    static Result<VmmSlab> map(std::unique_ptr<Mapping> mapping, Access access, const std::string& attempt);
    std::unique_ptr<Mapping> mapping_;
};

}  // namespace bulkhead::cuda

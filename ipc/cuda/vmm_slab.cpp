#include "ipc/cuda/vmm_slab.h"

#include <fcntl.h>

#include <fmt/format.h>

namespace bulkhead::cuda {

namespace {

/// The cuMemCreate properties of memory that can be shared by file descriptor.
CUmemAllocationProp shareable_on(const Gpu& gpu) {
    CUmemAllocationProp properties{};
    properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    properties.location = {CU_MEM_LOCATION_TYPE_DEVICE, gpu.device()};
    return properties;
}

/// Rounds up to the allocation granularity of such memory.
/// Errors  input_invalid: 0 bytes, or beyond 64 bits
Result<std::uint64_t> whole_allocation(const Gpu& gpu, std::uint64_t size_bytes) {
    const CUmemAllocationProp properties = shareable_on(gpu);
    std::size_t granularity = 0;
    const CUresult asked =
        gpu.driver().cuMemGetAllocationGranularity(&granularity, &properties, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED);
    if (auto known = gpu.driver().check("cuMemGetAllocationGranularity", asked); !known) return known.error();
    std::uint64_t rounded = 0;
    if (granularity == 0 || size_bytes == 0 || __builtin_add_overflow(size_bytes, granularity - 1, &rounded))
        return Error{ErrorCode::input_invalid, fmt::format("a size of {} bytes", size_bytes),
                     "ask for at least one byte and at most the device has"};
    return rounded / granularity * granularity;
}

}  // namespace

VmmSlab::Mapping::~Mapping() {
    const Driver& driver = gpu->driver();
    if (mapped) gpu->synchronize();
    const Gpu::Current current{*gpu};
    if (mapped) (void)driver.cuMemUnmap(pointer, size_bytes);
    (void)driver.cuMemRelease(handle);
    if (reserved_bytes > 0) (void)driver.cuMemAddressFree(pointer, reserved_bytes);
}

Result<VmmSlab> VmmSlab::create(std::shared_ptr<const Gpu> gpu, std::uint64_t size_bytes) {
    const Driver& driver = gpu->driver();
    const Gpu::Current current{*gpu};
    const std::string attempt =
        fmt::format("creating a shareable slab of {} bytes on {}", size_bytes, to_string(gpu->uuid()));
    const Result<std::uint64_t> whole = whole_allocation(*gpu, size_bytes);
    if (!whole) return Error{whole.error()}.during(attempt);

    const CUmemAllocationProp properties = shareable_on(*gpu);
    CUmemGenericAllocationHandle handle = 0;
    if (auto made = driver.check("cuMemCreate", driver.cuMemCreate(&handle, *whole, &properties, 0)); !made)
        return Error{made.error()}.during(attempt);
    return map(std::make_unique<Mapping>(std::move(gpu), *whole, handle), Access::read_write, attempt);
}

Result<VmmSlab> VmmSlab::import(std::shared_ptr<const Gpu> gpu, int fd, std::uint64_t size_bytes, Access access) {
    const Driver& driver = gpu->driver();
    const Gpu::Current current{*gpu};
    const std::string attempt = fmt::format("importing a slab of {} bytes on {}", size_bytes, to_string(gpu->uuid()));
    CUmemGenericAllocationHandle handle = 0;
    // The driver takes the descriptor's number in place of a pointer.
    const CUresult imported = driver.cuMemImportFromShareableHandle(
        &handle, reinterpret_cast<void*>(static_cast<std::intptr_t>(fd)), CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    if (auto opened = driver.check("cuMemImportFromShareableHandle", imported); !opened)
        return Error{opened.error()}.during(attempt);
    return map(std::make_unique<Mapping>(std::move(gpu), size_bytes, handle), access, attempt);
}

Result<VmmSlab> VmmSlab::map(std::unique_ptr<Mapping> mapping, Access access, const std::string& attempt) {
    const Driver& driver = mapping->gpu->driver();
    const std::uint64_t bytes = mapping->size_bytes;
    const Result<std::uint64_t> whole = whole_allocation(*mapping->gpu, bytes);
    if (!whole) return Error{whole.error()}.during(attempt);
    CUdeviceptr& pointer = mapping->pointer;
    if (auto reserved = driver.check("cuMemAddressReserve", driver.cuMemAddressReserve(&pointer, *whole, 0, 0, 0));
        !reserved)
        return Error{reserved.error()}.during(attempt);
    mapping->reserved_bytes = *whole;
    if (auto mapped = driver.check("cuMemMap", driver.cuMemMap(pointer, bytes, 0, mapping->handle, 0)); !mapped)
        return Error{mapped.error()}.during(attempt);
    mapping->mapped = true;
    const CUmemAccessDesc desc{{CU_MEM_LOCATION_TYPE_DEVICE, mapping->gpu->device()},
                               access == Access::read_only ? CU_MEM_ACCESS_FLAGS_PROT_READ
                                                           : CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    if (auto allowed = driver.check("cuMemSetAccess", driver.cuMemSetAccess(pointer, bytes, &desc, 1)); !allowed)
        return Error{allowed.error()}.during(attempt);
    return VmmSlab{std::move(mapping)};
}

Result<UniqueFd> VmmSlab::export_fd() const {
    const Driver& driver = mapping_->gpu->driver();
    const Gpu::Current current{*mapping_->gpu};
    int fd = -1;
    const CUresult exported =
        driver.cuMemExportToShareableHandle(&fd, mapping_->handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
    if (auto done = driver.check("cuMemExportToShareableHandle", exported); !done) return done.error();
    ::fcntl(fd, F_SETFD, FD_CLOEXEC);
    return UniqueFd{fd};
}

}  // namespace bulkhead::cuda

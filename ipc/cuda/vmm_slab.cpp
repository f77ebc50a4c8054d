#include "ipc/cuda/vmm_slab.h"

#include <fcntl.h>

#include <fmt/format.h>

namespace bulkhead::cuda {

VmmSlab::Mapping::~Mapping() {
    const Driver& driver = gpu->driver();
    if (mapped) gpu->synchronize();
    const Gpu::Current current{*gpu};
    if (mapped) (void)driver.cuMemUnmap(addresses->pointer(), size_bytes);
    (void)driver.cuMemRelease(handle);
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
    auto mapping = std::make_unique<Mapping>(std::move(gpu), *whole);
    mapping->handle = handle;
    Result<VmmSlab> slab = map(std::move(mapping), Access::read_write);
    return slab ? std::move(slab) : Result<VmmSlab>{std::move(slab).error().during(attempt)};
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
    auto mapping = std::make_unique<Mapping>(std::move(gpu), size_bytes);
    mapping->handle = handle;
    Result<VmmSlab> slab = map(std::move(mapping), access);
    return slab ? std::move(slab) : Result<VmmSlab>{std::move(slab).error().during(attempt)};
}

Result<VmmSlab> VmmSlab::map(std::unique_ptr<Mapping> mapping, Access access) {
    const Driver& driver = mapping->gpu->driver();
    const std::uint64_t bytes = mapping->size_bytes;
    Result<std::unique_ptr<const AddressRange>> reserved = AddressRange::reserve(mapping->gpu, bytes);
    if (!reserved) return std::move(reserved).error();
    mapping->addresses = std::move(*reserved);
    const CUdeviceptr pointer = mapping->addresses->pointer();
    if (auto mapped = driver.check("cuMemMap", driver.cuMemMap(pointer, bytes, 0, mapping->handle, 0)); !mapped)
        return mapped.error();
    mapping->mapped = true;
    const CUmemAccessDesc desc{{CU_MEM_LOCATION_TYPE_DEVICE, mapping->gpu->device()},
                               access == Access::read_only ? CU_MEM_ACCESS_FLAGS_PROT_READ
                                                           : CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    if (auto allowed = driver.check("cuMemSetAccess", driver.cuMemSetAccess(pointer, bytes, &desc, 1)); !allowed)
        return allowed.error();
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

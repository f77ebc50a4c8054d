#include "ipc/cuda/address_range.h"

#include <fmt/format.h>

namespace bulkhead::cuda {

CUmemAllocationProp shareable_on(const Gpu& gpu) {
    CUmemAllocationProp properties{};
    properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    properties.location = {CU_MEM_LOCATION_TYPE_DEVICE, gpu.device()};
    return properties;
}

Result<std::uint64_t> whole_allocation(const Gpu& gpu, std::uint64_t size_bytes) {
    const Driver& driver = gpu.driver();
    const Gpu::Current current{gpu};
    const CUmemAllocationProp properties = shareable_on(gpu);
    std::size_t granularity = 0;
    const CUresult asked =
        driver.cuMemGetAllocationGranularity(&granularity, &properties, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED);
    if (auto known = driver.check("cuMemGetAllocationGranularity", asked); !known) return known.error();
    std::uint64_t rounded = 0;
    if (granularity == 0 || size_bytes == 0 || __builtin_add_overflow(size_bytes, granularity - 1, &rounded))
        return Error{ErrorCode::input_invalid, fmt::format("a size of {} bytes", size_bytes),
                     "ask for at least one byte and at most the device has"};
    return rounded / granularity * granularity;
}

Result<std::unique_ptr<const AddressRange>> AddressRange::reserve(std::shared_ptr<const Gpu> gpu,
                                                                  std::uint64_t size_bytes) {
    const Result<std::uint64_t> whole = whole_allocation(*gpu, size_bytes);
    if (!whole) return whole.error();
    const Driver& driver = gpu->driver();
    const Gpu::Current current{*gpu};
    CUdeviceptr pointer = 0;
    if (auto reserved = driver.check("cuMemAddressReserve", driver.cuMemAddressReserve(&pointer, *whole, 0, 0, 0));
        !reserved)
        return reserved.error();
    return std::unique_ptr<const AddressRange>{new AddressRange{std::move(gpu), pointer, *whole}};
}

AddressRange::~AddressRange() {
    const Gpu::Current current{*gpu_};
    (void)gpu_->driver().cuMemAddressFree(pointer_, size_bytes_);
}

}  // namespace bulkhead::cuda

#include "ipc/cuda/legacy_slab.h"

#include <bit>

#include <fmt/format.h>

namespace bulkhead::cuda {
namespace {

/// CUDA programming guide, interprocess communication: "allocations of sizes aligned to 2 MiB
/// are recommended".
constexpr std::uint64_t granularity_bytes = 2u << 20;

}  // namespace

LegacySlab::LegacySlab(std::shared_ptr<const Gpu> gpu, CUdeviceptr pointer, std::uint64_t size_bytes, bool is_import)
    : gpu_{std::move(gpu)}, block_{reinterpret_cast<void*>(pointer),
                                   [owner = gpu_, pointer, is_import](void*) {
                                       owner->synchronize();
                                       const Gpu::Current current{*owner};
                                       const Driver& driver = owner->driver();
                                       (void)(is_import ? driver.cuIpcCloseMemHandle : driver.cuMemFree)(pointer);
                                   }},
      size_bytes_{size_bytes} {}

Result<LegacySlab> LegacySlab::create(std::shared_ptr<const Gpu> gpu, std::uint64_t size_bytes) {
    const Driver& driver = gpu->driver();
    const std::string attempt = fmt::format("allocating a slab of {} bytes on {}", size_bytes, to_string(gpu->uuid()));
    std::uint64_t rounded = 0;
    if (size_bytes == 0 || __builtin_add_overflow(size_bytes, granularity_bytes - 1, &rounded))
        return Error{ErrorCode::input_invalid, attempt, "ask for at least one byte and at most the device has"};
    rounded = rounded / granularity_bytes * granularity_bytes;
    const Gpu::Current current{*gpu};
    CUdeviceptr pointer = 0;
    if (auto made = driver.check("cuMemAlloc", driver.cuMemAlloc(&pointer, rounded)); !made)
        return Error{made.error()}.during(attempt);
    return LegacySlab{std::move(gpu), pointer, rounded, false};
}

Result<LegacySlab> LegacySlab::import(std::shared_ptr<const Gpu> gpu, const wire::CudaIpcHandle& handle,
                                      std::uint64_t size_bytes) {
    const Driver& driver = gpu->driver();
    const Gpu::Current current{*gpu};
    CUdeviceptr pointer = 0;
    const CUresult opened =
        driver.cuIpcOpenMemHandle(&pointer, std::bit_cast<CUipcMemHandle>(handle), CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
    if (auto done = driver.check("cuIpcOpenMemHandle", opened); !done)
        return Error{done.error()}.during(
            fmt::format("opening a slab of {} bytes on {}", size_bytes, to_string(gpu->uuid())));
    return LegacySlab{std::move(gpu), pointer, size_bytes, true};
}

Result<wire::CudaIpcHandle> LegacySlab::handle() const {
    const Driver& driver = gpu_->driver();
    const Gpu::Current current{*gpu_};
    CUipcMemHandle handle{};
    if (auto got = driver.check("cuIpcGetMemHandle", driver.cuIpcGetMemHandle(&handle, pointer())); !got)
        return got.error();
    return std::bit_cast<wire::CudaIpcHandle>(handle);
}

}  // namespace bulkhead::cuda

#include "ipc/cuda/legacy_slab.h"

#include <bit>

#include <fmt/format.h>

namespace bulkhead::cuda {
namespace {

/// CUDA programming guide, interprocess communication: "allocations of sizes aligned to 2 MiB
/// are recommended".
constexpr std::uint64_t granularity_bytes = 2u << 20;

}  // namespace

LegacySlab::Block::~Block() {
    gpu->synchronize();
    const Gpu::Current current{*gpu};
    if (imported)
        (void)gpu->driver().cuIpcCloseMemHandle(pointer);
    else
        (void)gpu->driver().cuMemFree(pointer);
}

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
    return LegacySlab{std::make_unique<Block>(std::move(gpu), pointer, rounded, false)};
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
    return LegacySlab{std::make_unique<Block>(std::move(gpu), pointer, size_bytes, true)};
}

Result<wire::CudaIpcHandle> LegacySlab::handle() const {
    const Driver& driver = block_->gpu->driver();
    const Gpu::Current current{*block_->gpu};
    CUipcMemHandle handle{};
    if (auto got = driver.check("cuIpcGetMemHandle", driver.cuIpcGetMemHandle(&handle, block_->pointer)); !got)
        return got.error();
    return std::bit_cast<wire::CudaIpcHandle>(handle);
}

}  // namespace bulkhead::cuda

#include "worker/slabs/gpu_slab_memory.h"

#include "ipc/cuda/legacy_slab.h"
#include "ipc/cuda/vmm_slab.h"

namespace bulkhead::worker {
namespace {

std::span<std::byte> device_bytes(cuda::CUdeviceptr pointer, std::uint64_t size_bytes) {
    return {reinterpret_cast<std::byte*>(pointer), size_bytes};
}

class VmmMemory final : public SlabMemory {
public:
    VmmMemory(cuda::VmmSlab slab, UniqueFd exported) : slab_{std::move(slab)}, exported_{std::move(exported)} {}
    [[nodiscard]] wire::SlabKind kind() const noexcept override { return wire::SlabKind::cuda_vmm; }
    [[nodiscard]] std::span<std::byte> bytes() const noexcept override {
        return device_bytes(slab_.pointer(), slab_.size_bytes());
    }
    [[nodiscard]] int fd() const noexcept override { return exported_.get(); }

private:
    cuda::VmmSlab slab_;
    UniqueFd exported_;
};

class LegacyMemory final : public SlabMemory {
public:
    LegacyMemory(cuda::LegacySlab slab, const wire::CudaIpcHandle& handle) : slab_{std::move(slab)}, handle_{handle} {}
    [[nodiscard]] wire::SlabKind kind() const noexcept override { return wire::SlabKind::cuda_ipc; }
    [[nodiscard]] std::span<std::byte> bytes() const noexcept override {
        return device_bytes(slab_.pointer(), slab_.size_bytes());
    }
    [[nodiscard]] int fd() const noexcept override { return -1; }
    [[nodiscard]] wire::CudaIpcHandle handle() const override { return handle_; }

private:
    cuda::LegacySlab slab_;
    wire::CudaIpcHandle handle_;
};

/// Clears device memory and waits: CUDA may hand out memory that holds another client's bytes.
Result<> clear(const cuda::Gpu& gpu, cuda::CUdeviceptr pointer, std::uint64_t size_bytes) {
    const cuda::Driver& driver = gpu.driver();
    const cuda::Gpu::Current current{gpu};
    const Result<> queued = driver.check("cuMemsetD8Async", driver.cuMemsetD8Async(pointer, 0, size_bytes, nullptr));
    return queued ? driver.check("cuStreamSynchronize", driver.cuStreamSynchronize(nullptr)) : queued;
}

}  // namespace

Result<std::unique_ptr<SlabMemory>> make_gpu_memory(wire::SlabKind kind, const std::shared_ptr<const cuda::Gpu>& gpu,
                                                    std::uint64_t size_bytes) {
    if (kind == wire::SlabKind::cuda_vmm) {
        Result<cuda::VmmSlab> slab = cuda::VmmSlab::create(gpu, size_bytes);
        if (!slab) return std::move(slab).error();
        if (Result<> cleared = clear(*gpu, slab->pointer(), slab->size_bytes()); !cleared)
            return std::move(cleared).error();
        Result<UniqueFd> exported = slab->export_fd();
        if (!exported) return std::move(exported).error();
        return std::make_unique<VmmMemory>(std::move(*slab), std::move(*exported));
    }
    Result<cuda::LegacySlab> slab = cuda::LegacySlab::create(gpu, size_bytes);
    if (!slab) return std::move(slab).error();
    if (Result<> cleared = clear(*gpu, slab->pointer(), slab->size_bytes()); !cleared)
        return std::move(cleared).error();
    const Result<wire::CudaIpcHandle> handle = slab->handle();
    if (!handle) return handle.error();
    return std::make_unique<LegacyMemory>(std::move(*slab), *handle);
}

}  // namespace bulkhead::worker

#include "worker/slabs/slab_memory.h"

namespace bulkhead::worker {
namespace {

/// Clears device memory and waits: CUDA may hand out memory that holds another client's bytes.
template <typename Slab>
Result<Slab> cleared(Result<Slab> slab) {
    if (!slab) return slab;
    const cuda::Gpu& gpu = *slab->gpu();
    const cuda::Driver& driver = gpu.driver();
    const cuda::Gpu::Current current{gpu};
    Result<> done =
        driver.check("cuMemsetD8Async", driver.cuMemsetD8Async(slab->pointer(), 0, slab->size_bytes(), nullptr));
    if (done) done = driver.check("cuStreamSynchronize", driver.cuStreamSynchronize(nullptr));
    if (!done) return std::move(done).error();
    return slab;
}

}  // namespace

Result<SlabMemory> SlabMemory::on_gpu(wire::SlabKind kind, const std::shared_ptr<const cuda::Gpu>& gpu,
                                      std::uint64_t size_bytes) {
    if (kind == wire::SlabKind::cuda_vmm) {
        Result<cuda::VmmSlab> slab = cleared(cuda::VmmSlab::create(gpu, size_bytes));
        if (!slab) return std::move(slab).error();
        Result<UniqueFd> exported = slab->export_fd();
        if (!exported) return std::move(exported).error();
        return SlabMemory{std::move(*slab), std::move(*exported)};
    }
    Result<cuda::LegacySlab> slab = cleared(cuda::LegacySlab::create(gpu, size_bytes));
    if (!slab) return std::move(slab).error();
    const Result<wire::CudaIpcHandle> handle = slab->handle();
    if (!handle) return handle.error();
    return SlabMemory{std::move(*slab), *handle};
}

}  // namespace bulkhead::worker

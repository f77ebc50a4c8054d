#include "clients/cpp/channel/slab_memory.h"

#include <utility>

#include "ipc/cuda/gpu.h"

namespace bulkhead {
namespace {

template <typename Slab>
Result<SlabMemory> on_gpu(Result<Slab> slab) {
    if (!slab) return std::move(slab).error();
    const std::span bytes{reinterpret_cast<std::byte*>(slab->pointer()), slab->size_bytes()};
    const int gpu = slab->gpu()->device();
    return SlabMemory{bytes.size(), bytes, gpu, -1, {}, std::move(*slab)};
}

}  // namespace

Result<SlabMemory> SlabMemory::import(const channel::SlabOffer& offer, UniqueFd fd,
                                      const std::shared_ptr<const cuda::Gpu>& gpu) {
    const bool is_output = offer.direction == wire::SlabDirection::output;
    if (offer.kind == wire::SlabKind::cuda_vmm)
        return on_gpu(cuda::VmmSlab::import(gpu, fd.get(), offer.size_bytes,
                                            is_output ? cuda::Access::read_only : cuda::Access::read_write));
    if (offer.kind == wire::SlabKind::cuda_ipc)
        return on_gpu(cuda::LegacySlab::import(gpu, offer.handle, offer.size_bytes));
    Result<HostSlab> slab = HostSlab::adopt(std::move(fd), offer.size_bytes, offer.direction);
    if (!slab) return std::move(slab).error();
    const std::span<std::byte> bytes = slab->bytes();
    const int memfd = slab->fd();
    return SlabMemory{bytes.size(), bytes, {}, memfd, {}, std::move(*slab)};
}

}  // namespace bulkhead

#include "clients/cpp/channel/slab_memory.h"

namespace bulkhead {

Result<SlabMemory> SlabMemory::import(const channel::SlabOffer& offer, UniqueFd fd,
                                      const std::shared_ptr<const cuda::Gpu>& gpu) {
    const auto kept = [](auto slab) -> Result<SlabMemory> {
        if (!slab) return std::move(slab).error();
        return SlabMemory{std::move(*slab)};
    };
    switch (offer.kind) {
    case wire::SlabKind::cuda_vmm:
        return kept(cuda::VmmSlab::import(gpu, fd.get(), offer.size_bytes,
                                          offer.direction == wire::SlabDirection::output ? cuda::Access::read_only
                                                                                         : cuda::Access::read_write));
    case wire::SlabKind::cuda_ipc: return kept(cuda::LegacySlab::import(gpu, offer.handle, offer.size_bytes));
    case wire::SlabKind::host_memfd: break;
    }
    return kept(HostSlab::adopt(std::move(fd), offer.size_bytes, offer.direction));
}

std::span<std::byte> SlabMemory::bytes() const noexcept {
    if (const auto* host = std::get_if<HostSlab>(&memory_)) return host->bytes();
    const auto device = [](const auto& slab) -> std::span<std::byte> {
        return {reinterpret_cast<std::byte*>(slab.pointer()), slab.size_bytes()};
    };
    if (const auto* vmm = std::get_if<cuda::VmmSlab>(&memory_)) return device(*vmm);
    if (const auto* legacy = std::get_if<cuda::LegacySlab>(&memory_)) return device(*legacy);
    return {};
}

std::uint64_t SlabMemory::size_bytes() const noexcept {
    const auto* unusable = std::get_if<Unusable>(&memory_);
    return unusable == nullptr ? bytes().size() : unusable->size_bytes;
}

const Error* SlabMemory::why_unusable() const noexcept {
    const auto* unusable = std::get_if<Unusable>(&memory_);
    return unusable == nullptr ? nullptr : &unusable->why;
}

std::optional<int> SlabMemory::gpu() const noexcept {
    if (const auto* vmm = std::get_if<cuda::VmmSlab>(&memory_)) return vmm->gpu()->device();
    if (const auto* legacy = std::get_if<cuda::LegacySlab>(&memory_)) return legacy->gpu()->device();
    return std::nullopt;
}

int SlabMemory::fd() const noexcept {
    const auto* host = std::get_if<HostSlab>(&memory_);
    return host == nullptr ? -1 : host->fd();
}

}  // namespace bulkhead

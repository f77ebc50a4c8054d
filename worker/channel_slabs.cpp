#include "worker/channel_slabs.h"

#include <algorithm>

#include <fmt/format.h>

#include "ipc/tensor_layout.h"
#include "worker/limits.h"

namespace bulkhead::worker {

Result<> ChannelSlabs::add(wire::SlabDirection direction, std::uint64_t size_bytes, std::uint64_t request_id) {
    std::uint32_t id = 0;
    {
        const std::lock_guard lock{mutex_};
        const std::uint64_t left = limits_.bytes_max - std::min(limits_.bytes_max, reserved_bytes_);
        if (size_bytes > left)
            return Error{ErrorCode::resources_exhausted,
                         fmt::format("a slab of {} bytes for a channel that has {} of its {}", size_bytes,
                                     reserved_bytes_, limits_.bytes_max),
                         "give results back sooner, or raise `channel.max` of the model"};
        if (reserved_slabs_ >= limits::channel_slabs_max)
            return Error{ErrorCode::resources_exhausted,
                         fmt::format("slab {} of a channel", limits::channel_slabs_max + 1),
                         "ask for fewer, larger slabs, or raise `channel.input` and `channel.output`"};
        constexpr std::uint64_t page = limits::slab_granularity_bytes;
        size_bytes = std::min(left, (size_bytes + page - 1) / page * page);
        reserved_bytes_ += size_bytes;
        ++reserved_slabs_;
        id = ++last_id_;
    }
    Result<HostSlab> memory = HostSlab::create(size_bytes, direction, fmt::format("{}{}", label_prefix_, id));
    const std::lock_guard lock{mutex_};
    if (!memory) {
        reserved_bytes_ -= size_bytes;
        --reserved_slabs_;
        return std::move(memory).error();
    }
    slabs_.push_back(
        std::make_unique<Slab>(Slab{id, direction, std::move(*memory), SlabAllocator{size_bytes}, request_id}));
    return {};
}

std::vector<ChannelSlabs::Offer> ChannelSlabs::take_offers() {
    const std::lock_guard lock{mutex_};
    std::vector<Offer> offers;
    for (; offered_ < slabs_.size(); ++offered_) {
        const Slab& slab = *slabs_[offered_];
        offers.push_back(
            {{slab.request_id, slab.id, slab.direction, wire::SlabKind::host_memfd, slab.memory.size_bytes()},
             slab.memory.fd()});
    }
    return offers;
}

Result<std::span<std::byte>> ChannelSlabs::input(const wire::LeaseRef& lease) const {
    const std::lock_guard lock{mutex_};
    const Slab* slab = find(lease.slab_id);
    if (slab == nullptr || slab->direction != wire::SlabDirection::input)
        return Error{ErrorCode::protocol_violation,
                     fmt::format("slab {} is no input slab of this channel", lease.slab_id),
                     "put inputs into a slab that was offered with direction input"};
    if (Result<> placed = check_placement(lease, slab->memory.size_bytes()); !placed) return std::move(placed).error();
    return slab->memory.bytes().subspan(lease.offset_bytes, lease.size_bytes);
}

Result<ChannelSlabs::Room> ChannelSlabs::allocate_output(std::uint64_t size_bytes) {
    if (auto room = allocate_in_existing(size_bytes)) return *room;
    // An output as large as the whole channel may be has no larger slab to hope for; else grow in decent steps.
    const std::uint64_t at_least = std::max<std::uint64_t>(size_bytes, wire::tensor_alignment);
    Result<> grown = add(wire::SlabDirection::output, std::max(at_least, limits::output_growth_bytes));
    if (!grown && grown.error().code == ErrorCode::resources_exhausted && at_least < limits::output_growth_bytes)
        grown = add(wire::SlabDirection::output, at_least);
    if (!grown) return std::move(grown).error();
    if (auto room = allocate_in_existing(size_bytes)) return *room;
    return Error{ErrorCode::internal, fmt::format("a fresh output slab has no room for {} bytes", size_bytes), {}};
}

std::optional<ChannelSlabs::Room> ChannelSlabs::allocate_in_existing(std::uint64_t size_bytes) {
    const std::lock_guard lock{mutex_};
    for (const auto& slab : slabs_) {
        if (slab->direction != wire::SlabDirection::output) continue;
        const auto block = slab->allocator.allocate(size_bytes);
        if (!block) continue;
        return Room{{slab->id, 0, block->offset_bytes, block->size_bytes, block->generation},
                    slab->memory.bytes().subspan(block->offset_bytes, block->size_bytes)};
    }
    return std::nullopt;
}

Result<> ChannelSlabs::release(const wire::LeaseRef& lease) {
    const std::lock_guard lock{mutex_};
    Slab* slab = find(lease.slab_id);
    if (slab == nullptr || slab->direction != wire::SlabDirection::output)
        return Error{
            ErrorCode::protocol_violation,
            fmt::format("releasing a lease of slab {}, which is no output slab of this channel", lease.slab_id),
            "give back each lease of a result once"};
    return slab->allocator.release({lease.offset_bytes, lease.size_bytes, lease.generation});
}

void ChannelSlabs::register_with(Model& model) {
    std::vector<std::span<std::byte>> fresh;
    {
        const std::lock_guard lock{mutex_};
        for (; registered_ < slabs_.size(); ++registered_) fresh.push_back(slabs_[registered_]->memory.bytes());
    }
    for (const std::span<std::byte> bytes : fresh) model.register_host_memory(bytes);
}

void ChannelSlabs::unregister_from(Model& model) noexcept {
    const std::lock_guard lock{mutex_};
    for (std::size_t i = 0; i < registered_; ++i) model.unregister_host_memory(slabs_[i]->memory.bytes());
    registered_ = 0;
}

std::uint64_t ChannelSlabs::size_bytes() const {
    const std::lock_guard lock{mutex_};
    return reserved_bytes_;
}

ChannelSlabs::Slab* ChannelSlabs::find(std::uint32_t id) const {
    const auto slab = std::ranges::find(slabs_, id, &Slab::id);
    return slab == slabs_.end() ? nullptr : slab->get();
}

}  // namespace bulkhead::worker

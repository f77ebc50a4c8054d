#include "worker/slabs/slab_source.h"

#include <algorithm>

#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include "worker/loop/limits.h"

namespace bulkhead::worker {

SlabSource::SlabSource(std::string label_prefix, const config::ChannelLimits& limits,
                       std::shared_ptr<SlabBudget> worker_bytes)
    : label_prefix_{std::move(label_prefix)}, huge_pages_{limits.huge_pages}, slab_count_{std::make_shared<SlabBudget>(
                                                                                  limits::channel_slabs_max)},
      bytes_{std::make_shared<SlabBudget>(limits.bytes_max)}, worker_bytes_{std::move(worker_bytes)} {}

Result<SlabSource::Made> SlabSource::make(wire::SlabKind kind, wire::SlabDirection direction,
                                          std::uint64_t size_bytes) {
    const std::uint64_t page =
        huge_pages_ || is_gpu(kind) ? limits::huge_slab_granularity_bytes : limits::slab_granularity_bytes;
    std::uint32_t id = 0;
    Result<Reservation> reserved = Reservation{};
    {
        const std::lock_guard lock{mutex_};
        if (const std::uint64_t left = bytes_->left(); size_bytes <= left) {
            const std::uint64_t rounded = (size_bytes + page - 1) / page * page;
            size_bytes = is_gpu(kind) ? rounded : std::min(left, rounded);
        }
        reserved = reserve(size_bytes);
        if (!reserved) return std::move(reserved).error();
        id = ++last_id_;
    }
    Result<SlabMemory> memory = make_memory(kind, direction, size_bytes, id);
    if (!memory) return std::move(memory).error();
    if (const std::uint64_t bytes = memory->bytes.size(); bytes > size_bytes) {
        // A device may allocate in steps larger than pages.
        reserved = Reservation{};
        reserved = reserve(bytes);
        if (!reserved) return std::move(reserved).error();
    }
    return Made{id, std::move(*reserved), std::move(*memory)};
}

Result<SlabSource::Reservation> SlabSource::reserve(std::uint64_t bytes) const {
    Reservation reserved;
    if (!(reserved.bytes = bytes_->take(bytes)))
        return Error{
            ErrorCode::resources_exhausted,
            fmt::format("a slab of {} bytes for a channel that has {} of its {}", bytes, bytes_->used(), bytes_->max()),
            "give results back sooner, or raise `channel.max` of the model"};
    if (!(reserved.slab = slab_count_->take(1)))
        return Error{ErrorCode::resources_exhausted, fmt::format("slab {} of a channel", slab_count_->max() + 1),
                     "ask for fewer, larger slabs, return loans, or raise `channel.input` and `channel.output`"};
    if (!(reserved.worker_bytes = worker_bytes_->take(bytes)))
        return Error{ErrorCode::resources_exhausted,
                     fmt::format("a slab of {} bytes; the slabs of all channels of this worker have {} of {}", bytes,
                                 worker_bytes_->used(), worker_bytes_->max()),
                     "close channels or give results back, or raise `channel.worker_max` of the model"};
    return reserved;
}

Result<SlabMemory> SlabSource::make_memory(wire::SlabKind kind, wire::SlabDirection direction, std::uint64_t size_bytes,
                                           std::uint32_t id) const {
    if (is_gpu(kind)) return SlabMemory::on_gpu(kind, gpu_, size_bytes);
    Result<HostSlab> slab = HostSlab::create(size_bytes, direction, fmt::format("{}{}", label_prefix_, id),
                                             huge_pages_ ? SlabPages::huge : SlabPages::plain);
    if (!slab) return std::move(slab).error();
    if (!slab->plain_because().empty()) {
        static std::once_flag said;  // the reason is the same for each slab of this worker
        std::call_once(said, [&] { spdlog::warn("slabs lie on plain pages: {}", slab->plain_because()); });
    }
    return SlabMemory{std::move(*slab)};
}

}  // namespace bulkhead::worker

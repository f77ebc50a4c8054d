#include "clients/cpp/channel/gpu_events.h"

#include <algorithm>

#include <fmt/format.h>

#include "clients/cpp/base/limits.h"
#include "clients/cpp/base/protocol_violation.h"

namespace bulkhead {

Result<> GpuEvents::take(const channel::EventOffer& offer) {
    const bool in_use = workers_.contains(offer.event_id) ||
                        std::ranges::any_of(own_, [&](const auto& own) { return own.first == offer.event_id; });
    if (in_use || workers_.size() + own_.size() >= limits::gpu_events_max)
        return protocol_violation(fmt::format("event {} is offered twice, or is one too many", offer.event_id));
    Result<cuda::InterprocessEvent> event = cuda::InterprocessEvent::import(gpu_, offer.handle);
    if (!event) return std::move(event).error();
    if (offer.from_worker)
        workers_.emplace(offer.event_id, std::move(*event));
    else
        own_.emplace_back(offer.event_id, std::move(*event));
    return {};
}

Result<> GpuEvents::make_wait(std::uint32_t id, void* stream) const {
    return workers_.at(id).make_wait(static_cast<cuda::CUstream>(stream));
}

Result<> GpuEvents::make_wait_for_answers(void* stream) const {
    for (const auto& [id, event] : workers_)
        if (Result<> waits = event.make_wait(static_cast<cuda::CUstream>(stream)); !waits) return waits;
    return {};
}

Result<std::uint32_t> GpuEvents::record(std::span<void* const> streams) {
    if (own_.empty())
        return Error{ErrorCode::internal, "recording an event, and the worker has offered none for it",
                     "use a client and a daemon of matching releases"};
    const auto& [id, event] = own_[turn_++ % own_.size()];
    auto* const last = static_cast<cuda::CUstream>(streams.back());
    for (void* const stream : streams) {
        if (const Result<> recorded = event.record(static_cast<cuda::CUstream>(stream)); !recorded)
            return recorded.error();
        if (stream == last) break;
        if (const Result<> waits = event.make_wait(last); !waits) return waits.error();
    }
    return id;
}

}  // namespace bulkhead

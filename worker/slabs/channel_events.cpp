#include "worker/slabs/channel_events.h"

namespace bulkhead::worker {

Result<ChannelEvents> ChannelEvents::make(const std::shared_ptr<const cuda::Gpu>& gpu) {
    ChannelEvents made;
    for (std::uint32_t id = 1; id <= 2 * limits::gpu_events; ++id) {
        Result<cuda::InterprocessEvent> event = cuda::InterprocessEvent::create(gpu);
        if (!event) return std::move(event).error();
        const Result<wire::CudaIpcHandle> handle = event->handle();
        if (!handle) return handle.error();
        made.events_.push_back(std::move(*event));
        made.offers_.push_back({id, id <= limits::gpu_events, *handle});
    }
    return made;
}

Result<> ChannelEvents::make_wait(cuda::CUstream stream, std::span<const std::uint32_t> ids) const {
    for (const std::uint32_t id : ids)
        if (Result<> waits = events_[id - 1].make_wait(stream); !waits) return waits;
    return {};
}

Result<std::uint32_t> ChannelEvents::record(cuda::CUstream stream) {
    const std::uint32_t id = last_ % limits::gpu_events + 1;
    last_ = id;
    const Result<> recorded = events_[id - 1].record(stream);
    if (!recorded) return recorded.error();
    return id;
}

}  // namespace bulkhead::worker

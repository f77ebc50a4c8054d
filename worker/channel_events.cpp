#include "worker/channel_events.h"

namespace bulkhead::worker {

Result<std::unique_ptr<ChannelEvents>> ChannelEvents::make(const std::shared_ptr<const cuda::Gpu>& gpu) {
    std::unique_ptr<ChannelEvents> made{new ChannelEvents{gpu}};
    {
        const cuda::Driver& driver = gpu->driver();
        const cuda::Gpu::Current current{*gpu};
        const cuda::CUresult created = driver.cuStreamCreate(&made->free_stream_, cuda::CU_STREAM_NON_BLOCKING);
        if (auto done = driver.check("cuStreamCreate", created); !done) return done.error();
    }
    for (std::uint32_t id = 1; id <= 2 * limits::gpu_events; ++id) {
        Result<cuda::InterprocessEvent> event = cuda::InterprocessEvent::create(gpu);
        if (!event) return std::move(event).error();
        const Result<wire::CudaIpcHandle> handle = event->handle();
        if (!handle) return handle.error();
        made->events_.push_back(std::move(*event));
        made->offers_.push_back({id, id <= limits::gpu_events, *handle});
    }
    return made;
}

ChannelEvents::~ChannelEvents() {
    if (free_stream_ == nullptr) return;
    const cuda::Gpu::Current current{*gpu_};
    (void)gpu_->driver().cuStreamDestroy(free_stream_);
}

void ChannelEvents::let_all_pass() const noexcept {
    for (std::uint32_t id = limits::gpu_events + 1; id <= 2 * limits::gpu_events; ++id)
        (void)events_[id - 1].record(free_stream_);  // a lost context has nobody left who waits
}

Result<> ChannelEvents::make_wait(cuda::CUstream stream, std::uint32_t id) const {
    return events_[id - 1].make_wait(stream);
}

Result<std::uint32_t> ChannelEvents::record(cuda::CUstream stream) {
    const std::uint32_t id = last_ % limits::gpu_events + 1;
    last_ = id;
    const Result<> recorded = events_[id - 1].record(stream);
    if (!recorded) return recorded.error();
    return id;
}

}  // namespace bulkhead::worker

#include "worker/slabs/channel_events.h"

namespace bulkhead::worker {

Result<std::unique_ptr<ChannelEvents>> ChannelEvents::make(const std::shared_ptr<const cuda::Gpu>& gpu) {
    std::unique_ptr<ChannelEvents> made{new ChannelEvents{gpu}};
    {
        const cuda::Driver& driver = gpu->driver();
        const cuda::Gpu::Current current{*gpu};
        const cuda::CUresult created = driver.cuStreamCreate(&made->free_stream_, cuda::CU_STREAM_NON_BLOCKING);
        if (auto done = driver.check("cuStreamCreate", created); !done) return done.error();
    }
    if (auto done = made->make_waits(); !done) return done.error();
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
    for (const Wait& wait : waits_)
        for (cuda::CUevent event : {wait.reached, wait.passed})
            if (event != nullptr) (void)gpu_->driver().cuEventDestroy(event);
}

Result<> ChannelEvents::make_waits() {
    const cuda::Driver& driver = gpu_->driver();
    const cuda::Gpu::Current current{*gpu_};
    for (Wait& wait : waits_)
        for (cuda::CUevent* event : {&wait.reached, &wait.passed})
            if (auto made = driver.check("cuEventCreate", driver.cuEventCreate(event, cuda::CU_EVENT_DISABLE_TIMING));
                !made)
                return made;
    return {};
}

void ChannelEvents::let_all_pass() const noexcept {
    client_is_gone_ = true;
    const std::unique_lock lock{mutex_, std::try_to_lock};
    if (lock) record_clients();  // a driver that holds `make_wait` up may hold up any call
}

void ChannelEvents::record_clients() const noexcept {
    for (std::uint32_t id = limits::gpu_events + 1; id <= 2 * limits::gpu_events; ++id)
        (void)events_[id - 1].record(free_stream_);  // after a lost context nothing waits
}

Result<> ChannelEvents::make_wait(cuda::CUstream stream, std::span<const std::uint32_t> ids) {
    if (ids.empty()) return {};
    Result<> queued = queue_wait(stream, ids);
    if (client_is_gone_) {
        const std::scoped_lock lock{mutex_};
        record_clients();
    }
    return queued;
}

Result<> ChannelEvents::queue_wait(cuda::CUstream stream, std::span<const std::uint32_t> ids) {
    const cuda::Driver& driver = gpu_->driver();
    const cuda::Gpu::Current current{*gpu_};
    const std::scoped_lock lock{mutex_};
    if (queued_ - passed_ == waits_.size()) (void)held_first();
    const bool counts = queued_ - passed_ < waits_.size();  // else a tracked wait blocks it, and stands for it
    const Wait& wait = waits_[queued_ % waits_.size()];
    if (counts)
        if (auto done = driver.check("cuEventRecord", driver.cuEventRecord(wait.reached, stream)); !done) return done;
    for (const std::uint32_t id : ids)
        if (Result<> waits = events_[id - 1].make_wait(stream); !waits) return waits;
    if (!counts) return {};
    if (auto done = driver.check("cuEventRecord", driver.cuEventRecord(wait.passed, stream)); !done) return done;
    ++queued_;
    return {};
}

ChannelEvents::Held ChannelEvents::held_at() const noexcept {
    const std::unique_lock lock{mutex_, std::try_to_lock};
    if (!lock) return {true, Held::in_driver};
    const cuda::Gpu::Current current{*gpu_};
    return held_first();
}

ChannelEvents::Held ChannelEvents::held_first() const noexcept {
    const auto is_done = [&](cuda::CUevent event) {
        return gpu_->driver().cuEventQuery(event) != cuda::CUDA_ERROR_NOT_READY;  // a lost context blocks nothing
    };
    while (passed_ < queued_ && is_done(waits_[passed_ % waits_.size()].passed)) ++passed_;
    if (passed_ == queued_) return {};
    return {true, is_done(waits_[passed_ % waits_.size()].reached) ? passed_ + 1 : 0};
}

Result<std::uint32_t> ChannelEvents::record(cuda::CUstream stream) {
    const std::uint32_t id = last_ % limits::gpu_events + 1;
    last_ = id;
    const Result<> recorded = events_[id - 1].record(stream);
    if (!recorded) return recorded.error();
    return id;
}

}  // namespace bulkhead::worker

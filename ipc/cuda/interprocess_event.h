#pragma once

#include <memory>

#include "ipc/cuda/gpu.h"

namespace bulkhead::cuda {

/// A point in a stream's work for which another process' stream can wait: tensors change hands by it, and no host
/// waits.
///
/// One event stands for its latest recording. A stream that is told to wait while a later one is already recorded waits
/// for that; since both sides record before they tell the other by message, it never waits for too little, nor in a
/// circle.
///
/// Owns    the event; the handle of a destroyed one must not be used
/// Thread  any; not synchronised
class InterprocessEvent {
public:
    /// Errors  not_permitted, internal
    static Result<InterprocessEvent> create(std::shared_ptr<const Gpu> gpu);
    /// In another process than the one that created it.
    static Result<InterprocessEvent> import(std::shared_ptr<const Gpu> gpu, const wire::CudaIpcHandle& handle);

    InterprocessEvent(InterprocessEvent&&) noexcept = default;
    InterprocessEvent& operator=(InterprocessEvent&&) noexcept = default;

    [[nodiscard]] Result<wire::CudaIpcHandle> handle() const;
    /// Behind all that was queued on the stream; a null stream is the default one.
    [[nodiscard]] Result<> record(CUstream stream) const;
    /// What is queued on the stream from now on runs after the latest recording. One never recorded has passed.
    [[nodiscard]] Result<> make_wait(CUstream stream) const;

private:
    struct Event {
        std::shared_ptr<const Gpu> gpu;
        CUevent event;
        Event(std::shared_ptr<const Gpu> owner, CUevent its) : gpu{std::move(owner)}, event{its} {}
        Event(const Event&) = delete;
        Event& operator=(const Event&) = delete;
        ~Event();
    };
    explicit InterprocessEvent(std::unique_ptr<Event> event) : event_{std::move(event)} {}
    std::unique_ptr<Event> event_;
};

}  // namespace bulkhead::cuda

#pragma once

#include <memory>

#include "ipc/cuda/gpu.h"

namespace bulkhead::cuda {

/// A point in a stream's work that a stream of another process can wait for. Hands over tensors
/// without a wait on the host.
///
/// An event stands for its latest recording. A stream told to wait after a later recording waits
/// for that one. Both sides record before they send their message, so a wait is never too short and
/// never circular.
///
/// Owns    the event; its handle must not be used after its destruction
/// Thread  any; not synchronised
class InterprocessEvent {
public:
    /// Errors  not_permitted, internal
    static Result<InterprocessEvent> create(std::shared_ptr<const Gpu> gpu);
    /// Call in another process than the one that created it.
    static Result<InterprocessEvent> import(std::shared_ptr<const Gpu> gpu, const wire::CudaIpcHandle& handle);

    [[nodiscard]] Result<wire::CudaIpcHandle> handle() const;
    /// Records behind all work queued on the stream; null: the default stream.
    [[nodiscard]] Result<> record(CUstream stream) const;
    /// Work queued from now on runs after the latest recording. An event never recorded
    /// does not block.
    [[nodiscard]] Result<> make_wait(CUstream stream) const;

private:
    InterprocessEvent(std::shared_ptr<const Gpu> gpu, CUevent event);
    std::shared_ptr<const Gpu> gpu_;
    std::shared_ptr<CUevent_st> event_;
};

}  // namespace bulkhead::cuda

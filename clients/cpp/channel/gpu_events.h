#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "ipc/channel/channel_codec.h"
#include "ipc/cuda/interprocess_event.h"

namespace bulkhead {

/// One connection's interprocess events: the worker's, for which this process' streams wait, and
/// those that this process records for the worker, in turn. The connection and its outputs share
/// them.
///
/// Thread  its channel's
class GpuEvents {
public:
    explicit GpuEvents(std::shared_ptr<const cuda::Gpu> gpu) : gpu_{std::move(gpu)} {}

    [[nodiscard]] const std::shared_ptr<const cuda::Gpu>& gpu() const noexcept { return gpu_; }
    /// Errors  those of opening the event; protocol_violation for a used number, or one
    ///         event too many
    Result<> take(const channel::EventOffer& offer);
    [[nodiscard]] bool is_workers(std::uint32_t id) const { return workers_.contains(id); }

    /// Makes work queued on the stream from now on wait for the worker's event.
    [[nodiscard]] Result<> make_wait(std::uint32_t id, void* stream) const;
    /// Makes it wait for each of the worker's events: it then runs after all requests that the
    /// worker has answered.
    [[nodiscard]] Result<> make_wait_for_answers(void* stream) const;
    /// Records an event behind all work queued on the streams, at least one. Returns its number.
    /// Errors  those of the driver; internal: none was offered
    [[nodiscard]] Result<std::uint32_t> record(std::span<void* const> streams);
    [[nodiscard]] Result<std::uint32_t> record(void* stream) { return record({&stream, 1}); }

private:
    std::shared_ptr<const cuda::Gpu> gpu_;
    std::map<std::uint32_t, cuda::InterprocessEvent> workers_;
    std::vector<std::pair<std::uint32_t, cuda::InterprocessEvent>> own_;
    std::size_t turn_ = 0;
};

}  // namespace bulkhead

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

/// The interprocess events of one session: the worker's, for which streams of this process wait, and those that this
/// process records for the worker, by turns. Shared by the session and the outputs that it brought.
///
/// Thread  that of its channel
class GpuEvents {
public:
    explicit GpuEvents(std::shared_ptr<const cuda::Gpu> gpu) : gpu_{std::move(gpu)} {}

    [[nodiscard]] const std::shared_ptr<const cuda::Gpu>& gpu() const noexcept { return gpu_; }
    /// Errors  those of opening it here; protocol_violation for a number that is in use, or one too many
    Result<> take(const channel::EventOffer& offer);
    [[nodiscard]] bool is_workers(std::uint32_t id) const { return workers_.contains(id); }

    /// What is queued on the stream from now on runs behind the worker's event.
    [[nodiscard]] Result<> make_wait(std::uint32_t id, void* stream) const;
    /// The same for each event of the worker's: behind all requests that it has answered.
    [[nodiscard]] Result<> make_wait_for_answers(void* stream) const;
    /// The number of an event behind all that is queued on the streams, of which there is one at least.
    /// Errors  of the driver; internal: none was offered
    [[nodiscard]] Result<std::uint32_t> record(std::span<void* const> streams);
    [[nodiscard]] Result<std::uint32_t> record(void* stream) { return record({&stream, 1}); }

private:
    std::shared_ptr<const cuda::Gpu> gpu_;
    std::map<std::uint32_t, cuda::InterprocessEvent> workers_;
    std::vector<std::pair<std::uint32_t, cuda::InterprocessEvent>> own_;
    std::size_t turn_ = 0;
};

}  // namespace bulkhead

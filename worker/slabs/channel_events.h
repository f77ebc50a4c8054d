#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "ipc/channel/channel_codec.h"
#include "ipc/cuda/interprocess_event.h"
#include "worker/loop/limits.h"

namespace bulkhead::worker {

/// The interprocess events with which a channel exchanges GPU memory. The worker records its own
/// behind results, in turn; the client records the others behind inputs. The worker creates both.
///
/// A stream that waits for a client's event waits as long as the client takes, and for ever if the
/// client dies first. `GpuJobs` bounds what then waits for the stream.
///
/// Thread  made and used on the executor; once made, `take_offers` and `is_clients` on any
class ChannelEvents {
public:
    /// Errors  those of InterprocessEvent::create
    static Result<ChannelEvents> make(const std::shared_ptr<const cuda::Gpu>& gpu);

    /// The events' offers, once.
    [[nodiscard]] std::vector<channel::EventOffer> take_offers() noexcept { return std::exchange(offers_, {}); }
    /// Whether the client records this event.
    [[nodiscard]] bool is_clients(std::uint32_t id) const noexcept {
        return id > limits::gpu_events && id <= 2 * limits::gpu_events;
    }

    /// Makes work queued on the stream from now on wait for these events of the client.
    [[nodiscard]] Result<> make_wait(cuda::CUstream stream, std::span<const std::uint32_t> ids) const;
    /// Records the worker's next event. Returns its id.
    [[nodiscard]] Result<std::uint32_t> record(cuda::CUstream stream);

private:
    ChannelEvents() = default;
    std::vector<cuda::InterprocessEvent> events_;  ///< event N is at N - 1
    std::vector<channel::EventOffer> offers_;
    std::uint32_t last_ = 0;
};

}  // namespace bulkhead::worker

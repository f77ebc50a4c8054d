#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "ipc/channel/channel_codec.h"
#include "ipc/cuda/interprocess_event.h"
#include "worker/loop/limits.h"

namespace bulkhead::worker {

/// The interprocess events by which a channel hands GPU memory over. The worker records some behind results, the client
/// records the others behind inputs. The worker makes both, and uses its own in turn.
///
/// Thread  made and used on the executor; `offers`, `is_clients`, `let_all_pass` and `held_at` on any, once it is made
class ChannelEvents {
public:
    ChannelEvents(const ChannelEvents&) = delete;
    ChannelEvents& operator=(const ChannelEvents&) = delete;
    ~ChannelEvents();

    /// Errors  those of InterprocessEvent::create
    static Result<std::unique_ptr<ChannelEvents>> make(const std::shared_ptr<const cuda::Gpu>& gpu);

    [[nodiscard]] const std::vector<channel::EventOffer>& offers() const noexcept { return offers_; }
    /// One that the client records.
    [[nodiscard]] bool is_clients(std::uint32_t id) const noexcept {
        return id > limits::gpu_events && id <= 2 * limits::gpu_events;
    }

    /// Work queued on the stream from now on waits for these events of the client.
    [[nodiscard]] Result<> make_wait(cuda::CUstream stream, std::span<const std::uint32_t> ids);
    /// Records the worker's next event. Returns its id.
    [[nodiscard]] Result<std::uint32_t> record(cuda::CUstream stream);

    /// The client is gone, and its work before the events may never run. Records them in its place, so that this
    /// worker's stream goes on. Blocks while `make_wait` is in the driver; if that never returns, the loop hangs and
    /// the supervisor ends this process.
    void let_all_pass() const noexcept;

    struct Held {
        static constexpr std::uint64_t in_driver = UINT64_MAX;  ///< `wait` while a call of `make_wait` has not returned
        bool any = false;                                       ///< the stream has not passed all waits
        std::uint64_t wait = 0;  ///< the wait that it stands at, numbered from 1; 0: it is busy before it
    };
    /// Where the worker's stream is among the waits for the client. Never waits.
    [[nodiscard]] Held held_at() const noexcept;

private:
    /// One wait, between two events of the worker's own.
    struct Wait {
        cuda::CUevent reached = nullptr;
        cuda::CUevent passed = nullptr;
    };
    Result<> make_waits();
    [[nodiscard]] Held held_first() const noexcept;  ///< with the lock held
    explicit ChannelEvents(std::shared_ptr<const cuda::Gpu> gpu) : gpu_{std::move(gpu)} {}
    std::shared_ptr<const cuda::Gpu> gpu_;
    cuda::CUstream free_stream_ = nullptr;         ///< on which nothing else is ever queued
    std::vector<cuda::InterprocessEvent> events_;  ///< number N stands at N - 1
    std::vector<channel::EventOffer> offers_;
    std::uint32_t last_ = 0;
    mutable std::mutex mutex_;                   ///< of the waits: each is queued whole before or after `let_all_pass`
    std::array<Wait, limits::gpu_waits> waits_;  ///< wait N stands at N - 1 modulo their number
    std::uint64_t queued_ = 0;
    mutable std::uint64_t passed_ = 0;
};

}  // namespace bulkhead::worker

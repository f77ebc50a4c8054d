#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "ipc/channel/channel_codec.h"
#include "ipc/cuda/interprocess_event.h"
#include "worker/loop/limits.h"

namespace bulkhead::worker {

/// The interprocess events with which a channel exchanges GPU memory. The worker records its own
/// behind results, in turn; the client records the others behind inputs. The worker creates both.
///
/// Thread  made and used on the executor; once made, `offers`, `is_clients`, `let_all_pass`, `held_at` on any
class ChannelEvents {
public:
    ChannelEvents(const ChannelEvents&) = delete;
    ChannelEvents& operator=(const ChannelEvents&) = delete;
    ~ChannelEvents();

    /// Errors  those of InterprocessEvent::create
    static Result<std::unique_ptr<ChannelEvents>> make(const std::shared_ptr<const cuda::Gpu>& gpu);

    [[nodiscard]] const std::vector<channel::EventOffer>& offers() const noexcept { return offers_; }
    /// Whether the client records this event.
    [[nodiscard]] bool is_clients(std::uint32_t id) const noexcept {
        return id > limits::gpu_events && id <= 2 * limits::gpu_events;
    }

    /// Makes work queued on the stream from now on wait for these events of the client.
    [[nodiscard]] Result<> make_wait(cuda::CUstream stream, std::span<const std::uint32_t> ids);
    /// Records the worker's next event. Returns its id.
    [[nodiscard]] Result<std::uint32_t> record(cuda::CUstream stream);

    /// Records the events of a client that has gone, because its work before them may never run;
    /// this worker's stream then goes on. Never blocks: if `make_wait` is in the driver, it records
    /// them when it returns.
    void let_all_pass() const noexcept;

    struct Held {
        static constexpr std::uint64_t in_driver = UINT64_MAX;  ///< `wait` during a call of `make_wait`
        bool any = false;                                       ///< the stream has not passed all waits
        std::uint64_t wait = 0;  ///< the wait that blocks it, numbered from 1; 0: it is busy with earlier work
    };
    /// Returns where the worker's stream is among the waits for the client. Never blocks.
    [[nodiscard]] Held held_at() const noexcept;

private:
    /// One wait, between two events of the worker.
    struct Wait {
        cuda::CUevent reached = nullptr;
        cuda::CUevent passed = nullptr;
    };
    Result<> make_waits();
    Result<> queue_wait(cuda::CUstream stream, std::span<const std::uint32_t> ids);
    void record_clients() const noexcept;            ///< with the lock held
    [[nodiscard]] Held held_first() const noexcept;  ///< with the lock held
    explicit ChannelEvents(std::shared_ptr<const cuda::Gpu> gpu) : gpu_{std::move(gpu)} {}
    std::shared_ptr<const cuda::Gpu> gpu_;
    cuda::CUstream free_stream_ = nullptr;         ///< no work is ever queued on it
    std::vector<cuda::InterprocessEvent> events_;  ///< event N is at N - 1
    std::vector<channel::EventOffer> offers_;
    std::uint32_t last_ = 0;
    mutable std::atomic<bool> client_is_gone_ = false;
    mutable std::mutex mutex_;                   ///< each wait is queued whole, before or after `record_clients`
    std::array<Wait, limits::gpu_waits> waits_;  ///< wait N is at N - 1 modulo their number
    std::uint64_t queued_ = 0;
    mutable std::uint64_t passed_ = 0;
};

}  // namespace bulkhead::worker

#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "ipc/channel_codec.h"
#include "ipc/cuda/interprocess_event.h"
#include "worker/limits.h"

namespace bulkhead::worker {

/// The interprocess events by which one channel hands GPU memory over: some that the worker records behind results,
/// some that the client records behind inputs. The worker makes both, and takes its own by turns.
///
/// Thread  made and used on the executor; `offers`, `is_clients` and `let_all_pass` on any, once it is made
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

    /// What is queued on the stream from now on runs behind the client's event.
    [[nodiscard]] Result<> make_wait(cuda::CUstream stream, std::uint32_t id) const;
    /// Records the next of the worker's own, and says which.
    [[nodiscard]] Result<std::uint32_t> record(cuda::CUstream stream);

    /// The client is gone, and what it had queued before its events may never run: records them in its place, so that
    /// this worker's stream goes on. Never waits.
    void let_all_pass() const noexcept;

private:
    explicit ChannelEvents(std::shared_ptr<const cuda::Gpu> gpu) : gpu_{std::move(gpu)} {}
    std::shared_ptr<const cuda::Gpu> gpu_;
    cuda::CUstream free_stream_ = nullptr;         ///< on which nothing else is ever queued
    std::vector<cuda::InterprocessEvent> events_;  ///< number N stands at N - 1
    std::vector<channel::EventOffer> offers_;
    std::uint32_t last_ = 0;
};

}  // namespace bulkhead::worker

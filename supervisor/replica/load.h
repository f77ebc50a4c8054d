#pragma once

#include <algorithm>
#include <chrono>
#include <functional>
#include <list>
#include <optional>
#include <utility>

#include "ipc/base/error.h"
#include "supervisor/base/deadline.h"
#include "supervisor/base/worker_name.h"
#include "supervisor/states/lifecycle.h"

namespace bulkhead::supervisor {

struct LoadedReplica {
    WorkerName worker;
    WorkerState state{};
    pid_t pid = 0;
    std::int64_t ms = 0;  ///< from the request
};

/// The callers that wait for one replica to be ready. Each is answered once.
/// Thread  the loop
class LoadWaiters {
public:
    using OnLoaded = std::function<void(Result<LoadedReplica>)>;
    enum class Urgency : std::uint8_t { now, when_due };  ///< when_due: the caller accepts to
                                                          ///< wait for a backoff

    explicit LoadWaiters(boost::asio::io_context& io) : io_{io} {}

    /// `late` makes the error if `deadline` passes before the answer.
    void add(OnLoaded loaded, Urgency urgency, std::optional<std::chrono::milliseconds> deadline,
             std::function<Error()> late) {
        auto& waiter = waiters_.emplace_back(io_, std::move(loaded), urgency);
        if (!deadline) return;
        waiter.deadline.arm(*deadline, [this, &waiter, late = std::move(late)] {
            const OnLoaded answer = std::move(waiter.loaded);
            const Error error = late();
            waiters_.remove_if([&](const Waiter& one) { return &one == &waiter; });
            answer(error);
        });
    }
    void answer(LoadedReplica loaded) {
        const auto now = Deadline::Clock::now();
        for (auto waiters = std::exchange(waiters_, {}); const Waiter& waiter : waiters) {
            loaded.ms = std::chrono::duration_cast<std::chrono::milliseconds>(now - waiter.since).count();
            waiter.loaded(loaded);
        }
    }
    void fail(const Error& error) {
        for (auto waiters = std::exchange(waiters_, {}); const Waiter& waiter : waiters) waiter.loaded(error);
    }

    [[nodiscard]] std::size_t size() const { return waiters_.size(); }
    [[nodiscard]] bool empty() const { return waiters_.empty(); }
    /// Returns true if a waiter does not accept to wait for a backoff.
    [[nodiscard]] bool any_now() const {
        return std::ranges::any_of(waiters_, [](const Waiter& waiter) { return waiter.urgency == Urgency::now; });
    }

private:
    struct Waiter {
        Waiter(boost::asio::io_context& io, OnLoaded on_loaded, Urgency how)
            : loaded{std::move(on_loaded)}, urgency{how}, deadline{io} {}
        OnLoaded loaded;
        Urgency urgency;
        Deadline::Clock::time_point since = Deadline::Clock::now();
        Deadline deadline;
    };

    boost::asio::io_context& io_;
    std::list<Waiter> waiters_;
};

}  // namespace bulkhead::supervisor

#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string_view>

#include <boost/asio/io_context.hpp>

#include "worker/loop/alarm.h"
#include "worker/loop/executor.h"
#include "worker/loop/latest_durations.h"
#include "worker/loop/status_page.h"
#include "worker/requests/request.h"
#include "worker/requests/scheduler.h"
#include "worker/requests/step_loop.h"

namespace bulkhead::worker {

/// Passes requests to the executor one at a time. Answers each exactly once: with its result,
/// its error, its deadline or its cancellation, whichever comes first. Generation requests go to
/// the step loop.
///
/// A running inference cannot be interrupted. If it was answered early, it runs on and its
/// result is discarded. Its inputs are released only after it ends, because the model reads
/// them until then.
///
/// Thread  the event loop
class Dispatcher {
public:
    struct Events {
        std::function<void()> busy;     ///< the first request is in flight
        std::function<void()> idle;     ///< no request for `limits::idle_after`
        std::function<void()> settled;  ///< the last one in flight has ended
        std::function<void()> ran_out;  ///< a request failed for want of memory
        /// At most once: an inference exceeds the model's request deadline. The listener must
        /// end this process.
        std::function<void(std::string_view method, std::chrono::milliseconds running)> overrun;
    };
    /// `page` shows what runs; may be null. It must outlive the executor's jobs.
    Dispatcher(boost::asio::io_context& io, Executor& executor, StatusPage* page, Events events);

    /// Call it before the first `submit`. The model must outlive the executor's jobs.
    void serve(Model& model, const config::ModelSpec& spec);

    /// Errors  queue_full: the request was not accepted, and `let_go` will not be called
    Result<> submit(RequestPtr request);
    /// No effect if the request is not in flight: its answer is on its way.
    void cancel(std::uint64_t channel, std::uint64_t id);
    /// `StepLoop::adjust`, for a generating model.
    Result<> adjust(std::uint64_t channel, const boost::json::object& parameters);
    /// Answers a streaming request with `error`.
    void end_stream(std::uint64_t channel, std::uint64_t id, const Error& error);
    /// The channel's client has gone: its requests get no answer.
    void drop(std::uint64_t channel);
    /// Answers all requests in flight with `error`.
    void fail_all(const Error& error);
    /// Counts a request that was refused before `submit`.
    void count_refused() noexcept { ++requests_, ++errors_; }

    /// Whether `busy` was the later of the two events.
    [[nodiscard]] bool busy() const noexcept { return busy_; }
    [[nodiscard]] std::size_t queued() const noexcept { return scheduler_.size() + (steps_ ? steps_->queued() : 0); }
    [[nodiscard]] std::size_t in_flight() const noexcept {
        return scheduler_.size() + (running_ ? 1 : 0) + (steps_ ? steps_->in_flight() : 0);
    }
    [[nodiscard]] std::uint64_t requests() const noexcept { return requests_; }
    [[nodiscard]] std::uint64_t errors() const noexcept { return errors_ + (steps_ ? steps_->errors() : 0); }
    /// Requests that failed for want of memory.
    [[nodiscard]] std::uint64_t out_of_memory() const noexcept { return out_of_memory_; }
    /// From arrival to result, for requests that the executor ran.
    [[nodiscard]] const LatestDurations& durations() const noexcept { return durations_; }
    /// Null unless the model generates.
    [[nodiscard]] const generation::StepLoop* steps() const noexcept { return steps_.get(); }

private:
    void start_next();
    void run();  ///< on the executor: runs `running_`
    void finished();
    void answer_early(const Error& error);  ///< answers `running_`
    void settle();
    void note_out_of_memory();
    [[nodiscard]] Clock::time_point enforce_deadlines();
    [[nodiscard]] Clock::time_point idle_due();

    Executor& executor_;
    StatusPage* page_;
    Events events_;
    Model* model_ = nullptr;
    std::chrono::milliseconds request_deadline_{0};
    Scheduler scheduler_{0};
    RequestPtr running_;  ///< read by the executor; meanwhile the loop only changes `answered`
    Clock::time_point started_;
    std::unique_ptr<generation::StepLoop> steps_;
    bool busy_ = false;
    bool overrun_told_ = false;
    Clock::time_point settled_at_;
    std::uint64_t requests_ = 0;
    std::uint64_t errors_ = 0;
    std::uint64_t out_of_memory_ = 0;
    LatestDurations durations_;
    Alarm deadlines_;
    Alarm idle_;
};

}  // namespace bulkhead::worker

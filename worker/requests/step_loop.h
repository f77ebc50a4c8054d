#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <vector>

#include <boost/json.hpp>

#include "worker/generation/batcher.h"
#include "worker/loop/executor.h"
#include "worker/loop/status_page.h"
#include "worker/requests/request.h"
#include "worker/requests/scheduler.h"

namespace bulkhead::worker::generation {

/// Carries requests to the batcher, and tokens back. A turn of the batcher is an executor job that
/// posts itself again, so the model's other methods run between two turns.
///
/// Requests without a slot wait in one queue per channel; channels take turns. Each request is
/// answered exactly once. One that ends early (cancelled, past its deadline, client gone) loses its
/// slot before the next step.
///
/// Thread  the event loop, unless a member says otherwise
class StepLoop : private Batcher::Listener {
public:
    struct Events {
        std::function<void()> settled;  ///< some requests have ended, maybe all
        std::function<void()> ran_out;  ///< a request failed for want of memory
        /// At most once: a turn exceeds the model's request deadline.
        std::function<void(std::chrono::milliseconds running)> overrun;
    };
    /// The arguments outlive the executor's jobs. `model.generator()` is not null.
    StepLoop(Executor& executor, StatusPage* page, Model& model, const config::ModelSpec& spec, Events events);

    [[nodiscard]] const Method& method() const noexcept { return method_; }

    /// `request->generate` must be set.
    /// Errors  queue_full: the request was not accepted, and `let_go` will not be called
    Result<> submit(RequestPtr request);
    /// Answers the request with `error`, if it is in flight.
    void end(std::uint64_t channel, std::uint64_t id, const Error& error);
    /// Changes how a sequence of this channel draws, from its next step; see `adjust_name`.
    /// Errors  input_invalid: bad parameters, or no such sequence has a slot
    Result<> adjust(std::uint64_t channel, const boost::json::object& parameters);
    /// The channel's client has gone: its requests get no answer.
    void drop(std::uint64_t channel);
    void fail_all(const Error& error);
    /// Ends requests past their deadline. Returns when to check next.
    [[nodiscard]] Clock::time_point enforce_deadlines(Clock::time_point now);

    [[nodiscard]] std::size_t queued() const noexcept { return scheduler_.size(); }
    [[nodiscard]] std::size_t in_flight() const noexcept { return queued() + flights_.size(); }
    [[nodiscard]] std::uint64_t errors() const noexcept { return errors_; }
    /// The member `generation` of docs/worker-link.md.
    [[nodiscard]] boost::json::object statistics() const;

private:
    using Number = Batcher::Number;

    /// To the executor.
    struct Command {
        Number number = 0;
        PendingRequest* begins = nullptr;    ///< null: change `sampling`, or remove it
        std::optional<Sampling> sampling{};  ///< none: remove it
    };
    struct Flight {
        RequestPtr request;  ///< the executor uses it: only `answered` may change here
        Sampling sampling;
    };
    using Flights = std::map<Number, Flight>;
    /// From the executor.
    struct Said {
        struct Part {
            Number number;
            std::size_t count;
        };
        struct End {
            Number number;
            std::optional<Ending> ending;  ///< empty: it was removed
        };
        std::vector<Part> parts;           ///< in the order of `tokens`
        std::vector<std::int32_t> tokens;  ///< of all parts, concatenated
        std::vector<End> ends;             ///< after the parts

        void clear() noexcept { parts.clear(), tokens.clear(), ends.clear(); }
    };

    // The event loop.
    [[nodiscard]] Flights::iterator find(std::uint64_t channel, std::uint64_t id);
    void start_more();
    void tell(Command command);
    void deliver();
    void ended(Said::End& end);
    void answer_early(Number number, PendingRequest& request, const Error& error);

    // The executor.
    [[nodiscard]] Executor::Then run();
    void obey(const Command& command);
    void turn();
    void gave(Number number, std::span<const std::int32_t> tokens) override;
    void ended(Number number, Ending ending) override;
    [[nodiscard]] Result<> write_tokens(PendingRequest& request, const Ending& ending);

    Executor& executor_;
    StatusPage* page_;
    Model& model_;
    const Method method_;
    const std::chrono::milliseconds step_deadline_;
    Events events_;

    Scheduler scheduler_;
    Flights flights_;
    Number last_ = 0;
    std::uint64_t errors_ = 0;
    bool overrun_told_ = false;
    Said heard_;  ///< kept to reuse its capacity

    mutable std::mutex mutex_;
    std::vector<Command> commands_;  ///< guarded by the mutex, as are the next two
    Said said_;
    bool turns_ = false;  ///< a job is posted or runs

    std::atomic<Clock::rep> turn_began_{0};  ///< 0: no turn runs
    Statistics statistics_;
    Batcher batcher_;                              ///< the executor's, as are the next three
    std::map<Number, PendingRequest*> sequences_;  ///< in the batcher
    std::vector<Command> obeyed_;                  ///< kept to reuse its capacity
    Said saying_;
};

}  // namespace bulkhead::worker::generation

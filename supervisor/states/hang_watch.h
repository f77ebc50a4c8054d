#pragma once

#include <chrono>
#include <cstdint>
#include <optional>

#include "supervisor/base/limits.h"

namespace bulkhead::supervisor {

/// Judges whether one serving worker hangs: by questions that it does not answer and, while it is busy, by the steps
/// that its page counts. Pure: the caller passes the time and the page, and looks when a look is due. Nothing is due
/// while the worker is idle and was asked nothing, unless the model has a `watchdog`.
class HangWatch {
public:
    using Time = std::chrono::steady_clock::time_point;
    using Duration = std::chrono::steady_clock::duration;

    struct Budgets {
        Duration step{};      ///< of one inference, or one step of a long one; with the grace for its own words
        Duration watchdog{};  ///< how often an idle worker is asked; 0: never
        Duration answer = limits::answer_deadline;  ///< to a question
    };
    /// What stands on the worker's page. Its clock is CLOCK_MONOTONIC, as ours.
    struct Reading {
        std::uint64_t steps = 0;
        std::optional<Time> running_since;  ///< empty: nothing runs
        friend bool operator==(const Reading&, const Reading&) = default;
    };
    enum class Verdict : std::uint8_t {
        nothing,
        ask,         ///< for statistics: its page shows no progress
        unanswered,  ///< a question, for longer than the budget of an answer
        no_step,     ///< something runs and made no step for its budget
    };

    HangWatch() = default;
    explicit HangWatch(Budgets budgets) : budgets_{budgets} {}

    /// It serves from now on, or became busy, or idle. `page`: empty for a worker that has none.
    void serves(Time now, bool busy, const std::optional<Reading>& page);
    /// False: a question is open already, and another is not sent.
    bool ask(Time now);
    void answered() { asked_at_.reset(); }

    [[nodiscard]] std::optional<Time> due() const;
    /// A late look means that this process slept, and perhaps the worker too: all times start again.
    [[nodiscard]] Verdict look(Time now, const std::optional<Reading>& page);

    /// How long a question is open, or nothing was seen to move.
    [[nodiscard]] Duration unanswered_for(Time now) const { return asked_at_ ? now - *asked_at_ : Duration{}; }
    [[nodiscard]] Duration still_for(Time now) const { return now - still_since(); }

private:
    [[nodiscard]] Duration look_interval() const;
    [[nodiscard]] Time still_since() const;
    void restart(Time now);

    Budgets budgets_;
    bool busy_ = false;
    std::optional<Reading> page_;  ///< as last seen
    Time moved_at_{};              ///< when it was last seen to differ
    Time look_at_{};
    std::optional<Time> asked_at_;
    std::optional<Time> watchdog_at_;
};

}  // namespace bulkhead::supervisor

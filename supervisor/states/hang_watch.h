#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <utility>

#include "supervisor/base/limits.h"

namespace bulkhead::supervisor {

/// Judges whether one serving worker hangs: it leaves a question unanswered or, while busy, its
/// page counts no steps. Pure: the caller passes the time and the page, and looks when a look is
/// due. Nothing is due while the worker is idle with no open question, unless the model has a
/// `watchdog`.
class HangWatch {
public:
    using Time = std::chrono::steady_clock::time_point;
    using Duration = std::chrono::steady_clock::duration;

    struct Budgets {
        Duration step{};      ///< of one inference, or one step of a long one; with the grace for
                              ///< the worker's report
        Duration watchdog{};  ///< interval of questions to an idle worker; 0: none
        Duration answer = limits::answer_deadline;  ///< for the answer to a question
    };
    /// The content of the worker's page. Its clock is CLOCK_MONOTONIC, as ours.
    struct Reading {
        std::uint64_t steps = 0;
        std::optional<Time> running_since;  ///< empty: nothing runs
        friend bool operator==(const Reading&, const Reading&) = default;
    };
    enum class Verdict : std::uint8_t {
        nothing,
        ask,         ///< ask for statistics: the page shows no progress
        unanswered,  ///< no answer within the budget
        no_step,     ///< a request runs, without a step within its budget
    };

    explicit HangWatch(Budgets budgets) : budgets_{budgets} {}

    /// The worker starts to serve, or became busy or idle. `page`: empty if it has none.
    void serves(Time now, bool busy, const std::optional<Reading>& page);
    /// Returns false if a question is still open: send another once it is answered, not now.
    bool ask(Time now);
    /// Returns true if another was wanted meanwhile: the worker may have answered before what it
    /// was wanted for.
    [[nodiscard]] bool answered() {
        asked_at_.reset();
        return std::exchange(wanted_again_, false);
    }

    [[nodiscard]] std::optional<Time> due() const;
    /// A late look means that this process slept, and perhaps the worker too: all times start over.
    [[nodiscard]] Verdict look(Time now, const std::optional<Reading>& page);

    /// How long a question has been open, or the page has not changed.
    [[nodiscard]] Duration unanswered_for(Time now) const { return asked_at_ ? now - *asked_at_ : Duration{}; }
    [[nodiscard]] Duration still_for(Time now) const { return now - still_since(); }

private:
    [[nodiscard]] Duration look_interval() const;
    [[nodiscard]] Time still_since() const;
    void restart(Time now);

    Budgets budgets_;
    bool busy_ = false;
    std::optional<Reading> page_;  ///< as last seen
    Time moved_at_{};              ///< when it last changed
    Time look_at_{};
    std::optional<Time> asked_at_;
    bool wanted_again_ = false;
    std::optional<Time> watchdog_at_;
};

}  // namespace bulkhead::supervisor

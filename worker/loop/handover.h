#pragma once

#include <compare>
#include <cstdint>
#include <utility>

namespace bulkhead::worker {

/// Which thread runs the event loop while the model's thread may be busy: the whole state, and both
/// threads' steps.
///
/// The model's thread runs the loop, and jobs in between. If a job outlasts the cover's timer, the
/// cover runs the loop, and gives it back as soon as the model's thread has no more jobs. In either
/// case the model's thread does what follows a job, under the handler lock.
///
///                  job begins          the timer finds the same job
///     model_loops ------------> job ------------------------------> covered
///         ^  ^                   |                                   |    ^
///         |  +--- job ends ------+                    no job waits   |    | job begins
///         |                                                          v    |
///         +------------- the cover has left the loop -------------- handing_back
///
/// Pure. The caller holds the executor's mutex for each call, which is one step.
class Handover {
public:
    enum class State : std::uint8_t {
        model_loops,   ///< the model's thread runs the loop
        job,           ///< it runs a job; no thread runs the loop
        covered,       ///< it runs jobs, and the cover runs the loop
        handing_back,  ///< it waits for a job, or until the cover has left the loop
    };
    enum class ModelThread : std::uint8_t { runs_loop, runs_job, interrupts_cover, waits };
    enum class Cover : std::uint8_t { sleeps, looks_rarely, watches, runs_loop };

    [[nodiscard]] State state() const noexcept { return state_; }

    /// Returns what the model's thread does next.
    [[nodiscard]] constexpr ModelThread next(bool job_waits) noexcept {
        if (state_ == State::model_loops && !job_waits) return ModelThread::runs_loop;
        if (state_ == State::covered && !job_waits) {
            state_ = State::handing_back;
            return ModelThread::interrupts_cover;
        }
        if (state_ == State::handing_back && !job_waits) return ModelThread::waits;
        if (state_ == State::model_loops) state_ = State::job;
        if (state_ == State::handing_back) state_ = State::covered;
        ++jobs_;
        return ModelThread::runs_job;
    }
    /// A job begins. Returns whether to set the timer, because the cover sleeps without one. A job
    /// still running when the timer expires is long.
    [[nodiscard]] constexpr bool wakes_cover() noexcept {
        if (watches_) return false;
        watches_ = true;
        jobs_seen_ = jobs_;
        return true;
    }
    /// The model thread's job has ended. True: it has the loop. False: the cover has it.
    [[nodiscard]] constexpr bool job_ended() noexcept {
        if (state_ == State::job) state_ = State::model_loops;
        return state_ == State::model_loops;
    }

    /// The timer has expired. Returns what the cover does next. A job that was running at the last
    /// expiry is long. Unless the cover sleeps, set the timer again: short if a job runs, longer if
    /// jobs came and went.
    [[nodiscard]] constexpr Cover rang() noexcept {
        if (std::exchange(jobs_seen_, jobs_) != jobs_)
            return state_ == State::job ? Cover::watches : Cover::looks_rarely;
        if (state_ == State::job) {
            state_ = State::covered;
            return Cover::runs_loop;
        }
        watches_ = false;
        return Cover::sleeps;
    }
    /// Called after each handler that the cover ran. Returns whether it keeps the loop.
    [[nodiscard]] constexpr bool keeps_loop() noexcept {
        if (state_ == State::handing_back) state_ = State::model_loops;
        return state_ == State::covered;
    }

    friend constexpr auto operator<=>(const Handover&, const Handover&) = default;

private:
    State state_ = State::model_loops;
    std::uint32_t jobs_ = 0;       ///< number of jobs begun
    std::uint32_t jobs_seen_ = 0;  ///< `jobs_` at the last expiry
    bool watches_ = false;         ///< the timer is set
};

}  // namespace bulkhead::worker

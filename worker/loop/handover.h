#pragma once

#include <cstdint>
#include <utility>

namespace bulkhead::worker {

/// Who runs the event loop while the model's thread may be busy: the whole state, and each step of the two threads.
///
/// The model's thread runs the loop, and jobs in between. While a job takes longer than the cover's timer, the cover
/// runs the loop; it gives the loop back as soon as the model's thread has nothing else to do. What follows a job is
/// done by the model's thread in either case, under the handlers' lock.
///
///                  job begins          the timer finds the same job
///     model_loops ------------> job ------------------------------> covered
///         ^  ^                   |                                   |    ^
///         |  +--- job ends ------+                    no job waits   |    | job begins
///         |                                                          v    |
///         +------------- the cover has left the loop -------------- handing_back
///
/// Pure. Each call is one step under the executor's mutex.
class Handover {
public:
    enum class State : std::uint8_t {
        model_loops,   ///< the model's thread runs the loop
        job,           ///< it runs a job, and nobody runs the loop
        covered,       ///< it runs jobs, one after another, and the cover runs the loop
        handing_back,  ///< it waits, for a job or until the cover has left the loop
    };
    enum class ModelThread : std::uint8_t { runs_loop, runs_job, interrupts_cover, waits };
    enum class Cover : std::uint8_t { sleeps, looks_rarely, watches, runs_loop };

    [[nodiscard]] State state() const noexcept { return state_; }

    /// What the model's thread does next.
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
    /// A job begins: whether the timer must be set, because the cover sleeps without one. A job that is still there
    /// when it rings is long.
    [[nodiscard]] constexpr bool wakes_cover() noexcept {
        if (watches_) return false;
        watches_ = true;
        jobs_seen_ = jobs_;
        return true;
    }
    /// Its job has ended. True: it has the loop. False: the cover has.
    [[nodiscard]] constexpr bool job_ended() noexcept {
        if (state_ == State::job) state_ = State::model_loops;
        return state_ == State::model_loops;
    }

    /// The timer has rung: what the cover does next. A job that was there at the last ring is long. Unless the cover
    /// sleeps, the timer must be set again: for soon where a job runs, and for later where jobs have come and gone.
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
    /// After each handler that the cover ran: whether it keeps the loop.
    [[nodiscard]] constexpr bool keeps_loop() noexcept {
        if (state_ == State::handing_back) state_ = State::model_loops;
        return state_ == State::covered;
    }

    friend constexpr bool operator==(const Handover&, const Handover&) = default;

private:
    State state_ = State::model_loops;
    std::uint32_t jobs_ = 0;       ///< begun so far
    std::uint32_t jobs_seen_ = 0;  ///< when the timer rang last
    bool watches_ = false;         ///< the timer is set
};

}  // namespace bulkhead::worker

#pragma once

#include <functional>
#include <optional>
#include <string>

#include "supervisor/base/deadline.h"
#include "supervisor/states/hang_watch.h"
#include "supervisor/worker_link/worker_link.h"

namespace bulkhead::supervisor {

struct WorkerProcess;

/// The progress of one load, and how long it may go on without any. Paused while the worker waits
/// for its grant: it waits for the loads of other workers.
/// Thread  the loop
class LoadWatch {
public:
    explicit LoadWatch(WorkerProcess& process);

    /// Call at the start, and when capturing begins. Each progress grants the full time again.
    void begin();
    void take(worker_link::Progress now);
    void pause();
    void resume();
    void end() { deadline_.cancel(); }

    /// "reading, 12 of 90 bytes"; empty: nothing was reported.
    [[nodiscard]] std::string text() const { return progress_.phase.empty() ? "" : worker_link::text_of(progress_); }
    [[nodiscard]] const worker_link::Progress& progress() const { return progress_; }

private:
    using Clock = Deadline::Clock;

    [[nodiscard]] std::chrono::milliseconds budget() const;
    void arm();
    void passed();
    void publish();
    [[nodiscard]] std::string last_progress() const;

    WorkerProcess& process_;
    worker_link::Progress progress_;
    Clock::time_point arrived_at_{};                ///< when `progress_` arrived
    Clock::time_point published_at_{};              ///< that of the progress last published
    Clock::time_point advanced_at_ = Clock::now();  ///< last new phase or higher `done`
    Clock::time_point until_{};
    std::optional<Clock::duration> left_;  ///< while paused
    Deadline deadline_;
};

/// Notices the hang of a serving process, and reads its memory while it loads or runs a request.
/// Thread  the loop
class ProcessWatch {
public:
    explicit ProcessWatch(WorkerProcess& process);

    /// Call after each change of state.
    void state_changed();
    /// Asks the worker for its statistics. Sends one question at a time, so that a hung worker does
    /// not collect them.
    /// `answered`  called when they arrived or never will; replaces a former callback
    void ask(std::function<void()> answered = nullptr);
    /// Call when statistics arrived.
    void answered();
    /// Call when no statistics will arrive.
    void answer_waiter();
    void end();
    [[nodiscard]] const HangWatch& hang() const { return hang_; }

private:
    void arm();
    void look();
    void keep_sampling();
    void sampled();

    WorkerProcess& process_;
    HangWatch hang_;
    std::function<void()> waiter_;  ///< for statistics
    Deadline due_;                  ///< until the next look
    Deadline sampling_;             ///< until the next sample
};

}  // namespace bulkhead::supervisor

#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <boost/asio/io_context.hpp>
#include <boost/asio/post.hpp>

#include "ipc/links/worker_link.h"
#include "worker/loop/alarm.h"
#include "worker/loop/handler_lock.h"
#include "worker/loop/limits.h"

namespace bulkhead::worker {

/// Passes a load's progress from its thread to the event loop. The start, each eighth and the end
/// of a phase are reported at once, so that a quick load is reported too. Other steps are limited
/// to one report per `limits::progress_interval`: the latest, so that the last one always arrives.
class LoadProgress : public std::enable_shared_from_this<LoadProgress> {
public:
    using Step = worker_link::Progress;
    using Report = std::function<void(const Step&)>;
    LoadProgress(boost::asio::io_context& io, Report report)
        : io_{io}, report_{std::move(report)}, next_report_{io, [this] {
                                                                deliver();
                                                                return never;
                                                            }} {}

    /// Thread  any
    void update(Step step) {
        const std::lock_guard lock{mutex_};
        const bool mark = is_mark(step) && marks_.size() < limits::progress_marks_max;
        const bool awaits_its_time = !mark && latest_.has_value();
        if (mark) {
            latest_.reset();
            marked_phase_ = step.phase;
            marked_done_ = step.done;
            marks_.push_back(std::move(step));
        } else {
            latest_ = std::move(step);
        }
        if (!awaits_its_time && !std::exchange(posted_, true))
            boost::asio::post(io_, HandlerLock::of(io_).wrap([self = shared_from_this()] { self->deliver(); }));
    }

    /// Sends what is left; nothing follows. Thread  the event loop
    void finish() {
        delivered_ = {};
        deliver();
        next_report_.cancel();
        report_ = nullptr;
    }

private:
    [[nodiscard]] bool is_mark(const Step& step) const {
        if (step.phase != marked_phase_) return true;
        if (step.done <= marked_done_) return false;
        return step.done == step.total || step.done - marked_done_ >= step.total / 8;
    }

    /// Sends the marks, and the latest step if its time has come. Takes both at once, so that their
    /// order is kept.
    void deliver() {
        if (!report_) return;
        const Clock::time_point now = Clock::now();
        std::vector<Step> reports;
        {
            const std::lock_guard lock{mutex_};
            posted_ = false;
            reports.swap(marks_);
            if (latest_ && now < delivered_ + limits::progress_interval) {
                next_report_.no_later_than(delivered_ + limits::progress_interval);
            } else if (latest_) {
                reports.push_back(*std::exchange(latest_, std::nullopt));
                delivered_ = now;
            }
        }
        for (const auto& report : reports) report_(report);
    }

    boost::asio::io_context& io_;
    Report report_;
    Clock::time_point delivered_{};
    std::mutex mutex_;
    std::vector<Step> marks_;     ///< to be sent at once
    std::optional<Step> latest_;  ///< newer than the marks; sent when its time comes
    bool posted_ = false;         ///< `deliver` is posted
    std::string marked_phase_;
    std::uint64_t marked_done_ = 0;
    Alarm next_report_;
};

}  // namespace bulkhead::worker

#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include <boost/asio/io_context.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/json.hpp>

#include "worker/alarm.h"
#include "worker/limits.h"

namespace bulkhead::worker {

/// Brings a load's progress from its thread to the event loop, at most one report per `limits::progress_interval`:
/// the latest, so that the last one always arrives.
class LoadProgress : public std::enable_shared_from_this<LoadProgress> {
public:
    using Report = std::function<void(const boost::json::object&)>;
    LoadProgress(boost::asio::io_context& io, Report report) : io_{io}, timer_{io}, report_{std::move(report)} {}

    /// Any thread.
    void update(boost::json::object message) {
        const std::lock_guard lock{mutex_};
        const bool on_its_way = latest_.has_value();
        latest_ = std::move(message);
        if (!on_its_way) boost::asio::post(io_, [self = shared_from_this()] { self->deliver(); });
    }

    /// The event loop: what is left to say is said, and nothing comes after.
    void finish() {
        timer_.cancel();
        if (auto message = take(); message && report_) report_(*message);
        report_ = nullptr;
    }

private:
    void deliver() {
        const auto due = delivered_ + limits::progress_interval;
        timer_.expires_at(delivered_ == Clock::time_point{} ? Clock::now() : due);
        timer_.async_wait([self = shared_from_this()](boost::system::error_code cancelled) {
            if (cancelled || !self->report_) return;
            self->delivered_ = Clock::now();
            if (const auto message = self->take()) self->report_(*message);
        });
    }
    std::optional<boost::json::object> take() {
        const std::lock_guard lock{mutex_};
        return std::exchange(latest_, std::nullopt);
    }

    boost::asio::io_context& io_;
    boost::asio::steady_timer timer_;
    Report report_;
    Clock::time_point delivered_{};
    std::mutex mutex_;
    std::optional<boost::json::object> latest_;
};

}  // namespace bulkhead::worker

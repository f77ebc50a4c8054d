#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>

#include <boost/asio/steady_timer.hpp>

#include "supervisor/base/limits.h"

namespace bulkhead::supervisor {

/// One timer of the loop, armed only while a wait is open. Arming again, cancelling or destroying
/// it cancels the former wait, even if its handler is already queued.
class Deadline {
public:
    using Clock = std::chrono::steady_clock;

    explicit Deadline(boost::asio::io_context& io) : timer_{io} {}
    Deadline(const Deadline&) = delete;
    Deadline& operator=(const Deadline&) = delete;
    ~Deadline() { cancel(); }

    void arm(Clock::duration after, std::function<void()> passed) {
        arm_until(Clock::now() + after, std::move(passed));
    }

    void arm_until(Clock::time_point when, std::function<void()> passed) {
        cancel();
        timer_.expires_at(when);
        armed_ = *serial_;
        timer_.async_wait([mine = armed_, serial = serial_, passed = std::move(passed)](boost::system::error_code ec) {
            if (ec || *serial != mine) return;
            ++*serial;
            passed();
        });
    }

    [[nodiscard]] bool is_armed() const noexcept { return *serial_ == armed_; }

    void cancel() {
        ++*serial_;
        timer_.cancel();
    }

private:
    boost::asio::steady_timer timer_;
    std::uint64_t armed_ = 0;  ///< the wait that is open, if it is still `serial_`
    std::shared_ptr<std::uint64_t> serial_ = std::make_shared<std::uint64_t>(1);
};

/// Is `due` so long past that this process itself must have been stopped?
[[nodiscard]] inline bool had_stopped(Deadline::Clock::time_point due, Deadline::Clock::time_point now) {
    return now - due > limits::own_sleep;
}

}  // namespace bulkhead::supervisor

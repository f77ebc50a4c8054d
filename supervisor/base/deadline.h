#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>

#include <boost/asio/steady_timer.hpp>

#include "supervisor/base/limits.h"

namespace bulkhead::supervisor {

/// One timer of the loop that is armed only while something is awaited. Arming it again, cancelling it
/// or destroying it makes the former wait void, even one whose handler is queued already.
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
        timer_.async_wait(
            [mine = *serial_, serial = serial_, passed = std::move(passed)](boost::system::error_code ec) {
                if (!ec && *serial == mine) passed();
            });
    }

    void cancel() {
        ++*serial_;
        timer_.cancel();
    }

private:
    boost::asio::steady_timer timer_;
    std::shared_ptr<std::uint64_t> serial_ = std::make_shared<std::uint64_t>(0);
};

/// Whether what was to be done at `due` is done so late that this process itself had stopped.
[[nodiscard]] inline bool had_stopped(Deadline::Clock::time_point due, Deadline::Clock::time_point now) {
    return now - due > limits::own_sleep;
}

}  // namespace bulkhead::supervisor

#pragma once

#include <chrono>
#include <functional>

#include <boost/asio/io_context.hpp>

namespace bulkhead::supervisor::test {

/// Runs the loop until `done` holds. False after a time that only a hang exceeds.
inline bool run_until(boost::asio::io_context& io, const std::function<bool()>& done) {
    using Clock = std::chrono::steady_clock;
    const auto hang = Clock::now() + std::chrono::seconds{30};
    while (!done()) {
        if (Clock::now() >= hang) return false;
        io.restart();
        io.run_one_for(std::chrono::milliseconds{5});  // what a peer outside the loop does is
                                                       // looked at this often
    }
    return true;
}

}  // namespace bulkhead::supervisor::test

#pragma once

#include <vector>

#include <boost/asio/as_tuple.hpp>
#include <boost/asio/awaitable.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/this_coro.hpp>
#include <boost/asio/use_awaitable.hpp>

#include "clients/cpp/base/wait_ready.h"

namespace bulkhead {

/// Wakes coroutines of one executor, which then check what they wait for. A wake-up only means that
/// something changed, `until` has passed, or the operation was cancelled.
class Signal {
public:
    boost::asio::awaitable<void> wait(Clock::time_point until) {
        const boost::asio::any_io_executor executor = co_await boost::asio::this_coro::executor;
        Waiting here{*this, executor, until};
        co_await here.timer.async_wait(boost::asio::as_tuple(boost::asio::use_awaitable));
    }
    void notify() {
        for (Waiting* each : waiting_) each->timer.cancel();
    }

private:
    /// Leaves the list with its coroutine, even if that is destroyed with its loop and
    /// never resumed.
    struct Waiting {
        Signal& signal;
        boost::asio::steady_timer timer;

        Waiting(Signal& on, const boost::asio::any_io_executor& executor, Clock::time_point until)
            : signal{on}, timer{executor, until} {
            signal.waiting_.push_back(this);
        }
        Waiting(const Waiting&) = delete;
        Waiting& operator=(const Waiting&) = delete;
        ~Waiting() { std::erase(signal.waiting_, this); }
    };
    std::vector<Waiting*> waiting_;
};

}  // namespace bulkhead

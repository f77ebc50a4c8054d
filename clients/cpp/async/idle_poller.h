#pragma once

#include <functional>
#include <memory>

#include <boost/asio/any_io_executor.hpp>
#include <boost/asio/posix/stream_descriptor.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/thread_pool.hpp>

#include "clients/cpp/base/wait_ready.h"
#include "ipc/base/closed_in_child.h"
#include "ipc/base/error.h"
#include "ipc/base/unique_fd.h"

namespace bulkhead {

/// Waits for a descriptor, or a time, on a thread of the loop's `BlockingThreads` that nobody blocks. It does not keep
/// the loop running: a loop with nothing else to do ends meanwhile.
///
/// Owns    an epoll descriptor; those that are waited for stay the caller's, and may be closed at any time
/// Thread  the loop's
class IdlePoller : public std::enable_shared_from_this<IdlePoller> {
public:
    /// After each wait `poll` is posted to the loop, which may be destroyed at any time.
    /// Errors  resources_exhausted
    static Result<std::shared_ptr<IdlePoller>> make(boost::asio::any_io_executor loop, std::function<void()> poll);

    /// Replaces the wait before: until `fd` (-1: none) is readable, or `until`. Once.
    void wait(int fd, Clock::time_point until);
    /// Until the next `wait`.
    void leave();

private:
    IdlePoller(boost::asio::any_io_executor loop, std::function<void()> poll, int epoll);
    bool watch(int fd);
    void begin(Clock::time_point until);
    void end();

    const boost::asio::any_io_executor loop_;
    const std::function<void()> poll_;
    const int epoll_;  ///< around the descriptor that is watched; `ready_` owns it
    int watched_ = -1;

    const boost::asio::thread_pool::executor_type thread_;  ///< the one for all that follows
    boost::asio::posix::stream_descriptor ready_;
    boost::asio::steady_timer alarm_;
    bool waits_ = false;
    ClosedInChild epoll_in_child_;
};

}  // namespace bulkhead

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

/// Waits for a descriptor, or a time, on a `BlockingThreads` thread that runs no blocking work.
/// Does not keep the loop running: a loop without other work ends meanwhile.
///
/// Owns    an epoll descriptor; the caller owns the watched ones and may close them at any time
/// Thread  the loop's
class IdlePoller : public std::enable_shared_from_this<IdlePoller> {
public:
    /// `poll` is posted to the loop after each wait. The loop may be destroyed at any time.
    /// Errors  resources_exhausted
    static Result<std::shared_ptr<IdlePoller>> make(boost::asio::any_io_executor loop, std::function<void()> poll);

    /// Replaces the previous wait. Waits once, until `fd` (-1: none) is readable, or `until`.
    void wait(int fd, Clock::time_point until);
    /// Stops waiting until the next `wait`.
    void leave();

private:
    IdlePoller(boost::asio::any_io_executor loop, std::function<void()> poll, int epoll);
    bool watch(int fd);
    void begin(Clock::time_point until);
    void end();

    const boost::asio::any_io_executor loop_;
    const std::function<void()> poll_;
    const int epoll_;  ///< contains the watched descriptor; `ready_` owns it
    int watched_ = -1;

    const boost::asio::thread_pool::executor_type thread_;  ///< the thread that uses
                                                            ///< all members below
    boost::asio::posix::stream_descriptor ready_;
    boost::asio::steady_timer alarm_;
    bool waits_ = false;
    ClosedInChild epoll_in_child_;
};

}  // namespace bulkhead

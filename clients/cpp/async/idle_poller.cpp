#include "clients/cpp/async/idle_poller.h"

#include <sys/epoll.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include <boost/asio/post.hpp>

#include "clients/cpp/async/blocking_threads.h"
#include "clients/cpp/base/limits.h"

namespace bulkhead {

namespace asio = boost::asio;

IdlePoller::IdlePoller(asio::any_io_executor loop, std::function<void()> poll, int epoll)
    : loop_{std::move(loop)}, poll_{std::move(poll)}, epoll_{epoll}, thread_{BlockingThreads::polling(loop_)},
      ready_{thread_}, alarm_{thread_}, epoll_in_child_{epoll_} {}

Result<std::shared_ptr<IdlePoller>> IdlePoller::make(asio::any_io_executor loop, std::function<void()> poll) {
    UniqueFd epoll{::epoll_create1(EPOLL_CLOEXEC)};
    if (!epoll) return system_error("waiting for a channel that rests", errno);
    std::shared_ptr<IdlePoller> poller{new IdlePoller{std::move(loop), std::move(poll), epoll.get()}};
    boost::system::error_code failed;
    poller->ready_.assign(epoll.get(), failed);  // the kernel limits a user's epoll watches
    if (failed) return system_error("waiting for a channel that rests", failed.value());
    static_cast<void>(epoll.release());
    return poller;
}

/// Replaces the watched descriptor. One closed meanwhile has already left the epoll.
bool IdlePoller::watch(int fd) {
    if (watched_ >= 0) ::epoll_ctl(epoll_, EPOLL_CTL_DEL, watched_, nullptr);
    watched_ = fd;
    epoll_event readable{EPOLLIN | EPOLLRDHUP, {.fd = fd}};
    return fd < 0 || ::epoll_ctl(epoll_, EPOLL_CTL_ADD, fd, &readable) == 0;
}

void IdlePoller::wait(int fd, Clock::time_point until) {
    if (epoll_in_child_.in_child()) return;  // the forked child has none of the threads
    // If the kernel refuses the watch, look again after a while.
    if (!watch(fd)) until = std::min(until, Clock::now() + limits::rest);
    asio::post(thread_, [self = shared_from_this(), until] { self->begin(until); });
}

void IdlePoller::leave() {
    if (epoll_in_child_.in_child()) return;
    watch(-1);
    asio::post(thread_, [self = shared_from_this()] {
        self->waits_ = false;
        self->alarm_.cancel();
        self->ready_.cancel();
    });
}

void IdlePoller::begin(Clock::time_point until) {
    waits_ = true;
    const auto ended = [self = shared_from_this()](boost::system::error_code failure) {
        if (!failure) self->end();
    };
    alarm_.expires_at(until);
    alarm_.async_wait(ended);
    ready_.cancel();
    ready_.async_wait(asio::posix::descriptor_base::wait_read, ended);
}

void IdlePoller::end() {
    if (!std::exchange(waits_, false)) return;
    alarm_.cancel();
    ready_.cancel();
    asio::post(loop_, poll_);
}

}  // namespace bulkhead

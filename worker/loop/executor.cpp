#include "worker/loop/executor.h"

#include <pthread.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <system_error>
#include <utility>

#include <boost/asio/post.hpp>
#include <spdlog/spdlog.h>

#include "worker/death/fatal_signals.h"
#include "worker/loop/limits.h"

namespace bulkhead::worker {

Executor::Executor(boost::asio::io_context& io)
    : io_{io}, handlers_{HandlerLock::of(io)}, timer_{::timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC)} {
    if (!timer_) throw std::system_error{errno, std::generic_category(), "creating a timer for the event loop"};
}

void Executor::post(Job job) {
    const std::lock_guard lock{mutex_};
    jobs_.push_back(std::move(job));
    model_thread_waits_.notify_one();
}

void Executor::run() {
    std::unique_lock lock{mutex_};
    if (!ended_) model_thread_ = std::thread{[this] { serve(); }};
    while (!ended_) {
        lock.unlock();
        await_timer();
        lock.lock();
        const Handover::Cover next = handover_.rang();
        if (next == Handover::Cover::runs_loop) {
            do run_loop(lock);
            while (!ended_ && handover_.keeps_loop());
            model_thread_waits_.notify_one();
        }
        if (next == Handover::Cover::sleeps || ended_) continue;
        lock.unlock();
        set_timer(next == Handover::Cover::looks_rarely ? limits::cover_looks_every : limits::cover_after);
        lock.lock();
    }
}

void Executor::serve() {
    ::pthread_setname_np(::pthread_self(), "executor");
    const SignalStack stack;  // so that a model's stack overflow is reported too
    std::unique_lock lock{mutex_};
    while (!ended_) {
        const Handover::ModelThread next = handover_.next(!jobs_.empty());
        if (next == Handover::ModelThread::waits) {  // a hang report then names the cover
            model_thread_waits_.wait(lock);
            continue;
        }
        if (next == Handover::ModelThread::interrupts_cover) {
            lock.unlock();
            boost::asio::post(io_, [] {});
            lock.lock();
            continue;
        }
        const HangSuspect suspect;
        if (next == Handover::ModelThread::runs_job)
            run_job(lock);
        else
            run_loop(lock);
    }
}

void Executor::run_loop(std::unique_lock<std::mutex>& lock) {
    lock.unlock();
    const bool stopped = io_.run_one() == 0;
    lock.lock();
    if (stopped) end();
}

void Executor::run_job(std::unique_lock<std::mutex>& lock) {
    Job job = std::move(jobs_.front());
    jobs_.pop_front();
    if (handover_.wakes_cover()) set_timer(limits::cover_after);
    lock.unlock();
    Then then = job();
    job = nullptr;
    lock.lock();
    followers_.push_back(std::move(then));
    const bool has_loop = handover_.job_ended();
    lock.unlock();
    // A cover that handles an event is awake, and does this next.
    if (!handlers_.try_run([this] { follow_jobs(); }))
        boost::asio::post(io_, handlers_.wrap([this] { follow_jobs(); }));
    lock.lock();
    if (!has_loop || jobs_.empty()) return;
    lock.unlock();
    // Handles what arrives between jobs, however many jobs wait.
    for (std::size_t i = 0; i < limits::handlers_between_jobs && io_.poll_one() > 0; ++i) {
    }
    lock.lock();
    if (io_.stopped()) end();
}

/// Runs the followers in the order of their jobs.
void Executor::follow_jobs() {
    std::vector<Then> followers;
    {
        const std::lock_guard lock{mutex_};
        followers.swap(followers_);
    }
    for (const Then& then : followers) then();
}

/// Ends the loop. If the model's thread waits, the cover runs the loop and wakes it when it leaves.
void Executor::end() {
    ended_ = true;
    set_timer(std::chrono::nanoseconds{1});
}

void Executor::stop() {
    io_.stop();
    {
        const std::lock_guard lock{mutex_};
        end();
    }
    if (model_thread_.joinable()) model_thread_.join();
    std::deque<Job> jobs;
    std::vector<Then> followers;
    const std::lock_guard lock{mutex_};  // released before the followers, whose members
                                         // may call `post`
    jobs_.swap(jobs);
    followers_.swap(followers);
}

void Executor::set_timer(std::chrono::nanoseconds after) const noexcept {
    const itimerspec once{{}, {0, after.count()}};
    ::timerfd_settime(timer_.get(), 0, &once, nullptr);
}

void Executor::await_timer() const noexcept {
    std::uint64_t rings = 0;
    while (::read(timer_.get(), &rings, sizeof rings) < 0) {
        if (errno == EINTR) continue;
        spdlog::critical("reading the event loop's timer: {}; the worker ends", std::strerror(errno));
        std::abort();
    }
}

}  // namespace bulkhead::worker

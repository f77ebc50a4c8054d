#include "supervisor/base/blocking_queue.h"

#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <system_error>

#include <boost/asio/post.hpp>
#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include "supervisor/base/text.h"

namespace bulkhead::supervisor {

using Clock = Deadline::Clock;

struct BlockingQueue::Job {
    std::string what;
    std::function<void()> work;              ///< used and destroyed on the thread
    std::function<void(const Error*)> tell;  ///< used and destroyed on the loop; null: answered

    void answer(const Error* given_up) {
        if (const auto once = std::exchange(tell, nullptr)) once(given_up);
    }
};

/// Shared with threads that may outlive their owner.
struct BlockingQueue::State {
    mutable std::mutex mutex;
    std::condition_variable changed;
    std::deque<JobPointer> waiting;
    JobPointer running;
    Clock::time_point since{};  ///< when the running job started
    pid_t tid = 0;              ///< thread of the running job
    std::uint64_t number = 0;   ///< of the present thread; all others were given up
    std::size_t stuck = 0;
    bool ending = false;

    [[nodiscard]] bool is_ending() const {
        const std::lock_guard lock{mutex};
        return ending;
    }
};

BlockingQueue::BlockingQueue(boost::asio::io_context& io, Clock::duration deadline, std::size_t stuck_max)
    : io_{io}, deadline_{deadline}, stuck_max_{stuck_max}, state_{std::make_shared<State>()}, watch_{io} {}

BlockingQueue::~BlockingQueue() { (void)end(); }

bool BlockingQueue::end(Clock::duration patience) {
    std::unique_lock lock{state_->mutex};
    state_->ending = true;
    state_->changed.notify_all();
    if (thread_.joinable()) {
        const auto until = std::min(state_->since + deadline_, Clock::now() + patience);
        const bool ends = state_->changed.wait_until(lock, until, [&] { return !state_->running; });
        if (!ends) abandon();
        lock.unlock();
        if (ends) thread_.join();
        lock.lock();
    }
    watch_.cancel();
    return state_->stuck == 0;
}

/// Call with the lock held. Gives up the present thread and its job.
BlockingQueue::JobPointer BlockingQueue::abandon() {
    ++state_->number;
    ++state_->stuck;
    thread_.detach();
    return std::exchange(state_->running, nullptr);
}

std::size_t BlockingQueue::waiting() const {
    const std::lock_guard lock{state_->mutex};
    return state_->waiting.size() + (state_->running ? 1 : 0);
}

void BlockingQueue::add(std::string what, std::function<void()> work, std::function<void(const Error*)> tell) {
    const auto job = std::make_shared<Job>(Job{std::move(what), std::move(work), std::move(tell)});
    {
        const std::lock_guard lock{state_->mutex};
        if (state_->stuck >= stuck_max_) return refuse(job);
        state_->waiting.push_back(job);
    }
    if (!thread_.joinable() && !start_thread()) {
        const std::lock_guard lock{state_->mutex};
        for (const JobPointer& one : std::exchange(state_->waiting, {})) refuse(one);
    }
    state_->changed.notify_all();
    watch();
}

/// Returns false if the system cannot create another thread.
bool BlockingQueue::start_thread() {
    try {
        thread_ = std::thread{[this, state = state_, number = state_->number] { work(state, number); }};
        return true;
    } catch (const std::system_error& error) {
        spdlog::error("starting a thread: {}", error.what());
        return false;
    }
}

/// `this` exists as long as `number` is the present thread's.
void BlockingQueue::work(const std::shared_ptr<State>& state, std::uint64_t number) {
    std::unique_lock lock{state->mutex};
    state->tid = ::gettid();
    while (true) {
        state->changed.wait(lock, [&] { return state->ending || !state->waiting.empty(); });
        if (state->ending) return;
        JobPointer job = std::move(state->waiting.front());
        state->waiting.pop_front();
        state->running = job;
        state->since = Clock::now();
        lock.unlock();
        job->work();
        job->work = nullptr;
        lock.lock();
        if (state->number != number) {
            --state->stuck;
            return;
        }
        state->running = nullptr;
        boost::asio::post(io_, [this, state, job = std::move(job)] {
            if (!state->is_ending()) watch();  // otherwise `this` is gone
            job->answer(nullptr);
        });
        state->changed.notify_all();
    }
}

/// Arms the deadline of the running job, or of the one about to run.
void BlockingQueue::watch() {
    const std::lock_guard lock{state_->mutex};
    if (!state_->running && state_->waiting.empty()) return watch_.cancel();
    const auto since = state_->running ? state_->since : Clock::now();
    watch_.arm_until(since + deadline_, [this] { look(); });
}

void BlockingQueue::look() {
    JobPointer job;
    std::deque<JobPointer> refused;
    pid_t tid = 0;
    {
        const std::lock_guard lock{state_->mutex};
        if (state_->running && had_stopped(state_->since + deadline_, Clock::now()))
            state_->since = Clock::now();  // this process was stopped, and the job with it
        if (state_->running && state_->since + deadline_ <= Clock::now()) {
            tid = state_->tid;
            job = abandon();
            if (!state_->waiting.empty() && (state_->stuck >= stuck_max_ || !start_thread()))
                refused = std::exchange(state_->waiting, {});
        }
    }
    watch();
    if (!job) return;
    const Error error{ErrorCode::deadline_exceeded,
                      fmt::format("{}: no end within {}", job->what, duration_text(deadline_)),
                      fmt::format("it waits in the kernel, for a disk, a network file system or a process: see "
                                  "/proc/{}/task/{}/stack",
                                  ::getpid(), tid)};
    spdlog::error("{}", error.text());
    job->answer(&error);
    for (const JobPointer& one : refused) refuse(one);
}

/// Answers later, as for all other jobs.
void BlockingQueue::refuse(const JobPointer& job) {
    boost::asio::post(io_, [job] {
        const Error error{ErrorCode::resources_exhausted,
                          fmt::format("{}: no thread can run it, others wait in the kernel", job->what),
                          fmt::format("see /proc/{}/task/*/stack: a disk, a network file system or a device hangs; or "
                                      "the limit of processes is too low (`ulimit -u`)",
                                      ::getpid())};
        job->work = nullptr;
        job->answer(&error);
    });
}

}  // namespace bulkhead::supervisor

#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>

#include <boost/asio/io_context.hpp>

#include "ipc/base/error.h"
#include "supervisor/base/deadline.h"
#include "supervisor/base/limits.h"

namespace bulkhead::supervisor {

/// A thread for slow work: reading /proc (23 ms for the memory of a 4 GiB process), NVML, disks.
///
/// A job that exceeds `blocking_job_deadline` is stuck in the kernel: its caller gets an error, its
/// thread is detached and ends when the kernel lets it, and later jobs run on a new thread. With
/// `blocking_stuck_max` stuck threads, every job is refused until one returns.
///
/// Thread  call `run` on the loop. Jobs run on the other thread, in order; `done` runs on the loop,
///         in the same order, after `run` has returned
/// Owns    captures of a job live as long as its thread, perhaps longer than this
/// Errors  deadline_exceeded, resources_exhausted, and those of the job itself
/// Bound   each worker has at most a few jobs; jobs for clients are refused at
///         `blocking_requests_max`
class BlockingQueue {
    template <typename Value>
    static Result<Value> answer_of(Value value);
    template <typename Value>
    static Result<Value> answer_of(Result<Value> value);

public:
    explicit BlockingQueue(boost::asio::io_context& io,
                           Deadline::Clock::duration deadline = limits::blocking_job_deadline,
                           std::size_t stuck_max = limits::blocking_stuck_max);
    BlockingQueue(const BlockingQueue&) = delete;
    BlockingQueue& operator=(const BlockingQueue&) = delete;
    /// Calls `end`.
    ~BlockingQueue();

    /// `what`  describes the job, for errors
    /// `done`  receives the job's Result, or a Result of its value
    template <typename Job, typename Done>
    void run(std::string what, Job job, Done done) {
        using Answer = decltype(answer_of(job()));
        const auto answer = std::make_shared<std::optional<Answer>>();
        add(
            std::move(what), [answer, job = std::move(job)]() mutable { answer->emplace(job()); },
            [answer, done = std::move(done)](const Error* given_up) mutable {
                if (given_up != nullptr) return done(Answer{*given_up});
                done(std::move(**answer));
            });
    }

    /// As `run`, for a client. Errors  queue_full: `blocking_requests_max` jobs wait
    template <typename Job, typename Done>
    void run_for_client(const std::string& what, Job job, Done done) {
        if (waiting() >= limits::blocking_requests_max)
            return done(Error{ErrorCode::queue_full, what + ": too many wait for that", "ask again later"});
        run(what, std::move(job), std::move(done));
    }

    /// Jobs that wait or run, without those given up.
    [[nodiscard]] std::size_t waiting() const;
    /// Waits for the running job, at most for its deadline or `patience`, and drops the others.
    /// False: a thread is stuck and may return at any time, so nothing that a job refers to may be
    /// destroyed: leave by _Exit().
    [[nodiscard]] bool end(Deadline::Clock::duration patience = std::chrono::hours{1});

private:
    struct Job;
    struct State;
    using JobPointer = std::shared_ptr<Job>;

    void add(std::string what, std::function<void()> work, std::function<void(const Error*)> tell);
    bool start_thread();
    void work(const std::shared_ptr<State>& state, std::uint64_t number);
    void watch();
    void look();
    JobPointer abandon();
    void refuse(const JobPointer& job);

    boost::asio::io_context& io_;
    const Deadline::Clock::duration deadline_;
    const std::size_t stuck_max_;
    std::shared_ptr<State> state_;
    std::thread thread_;  ///< the present one; the first job starts it
    Deadline watch_;      ///< of the running job
};

}  // namespace bulkhead::supervisor

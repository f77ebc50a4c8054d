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

/// One thread for what may be slow: reading /proc (23 ms for the memory of a 4 GiB process), asking NVML, disks.
///
/// A job that is not done in `off_loop_job_deadline` is stuck in the kernel: its caller gets an error, its thread is
/// left to itself and ends when the kernel lets it, and the jobs behind it run on another. With
/// `off_loop_stuck_max` such threads every job is refused, until one of them comes back.
///
/// Thread  `run` is called on the loop; the job runs on the other thread, in order; `done` on the loop, later than
///         `run` returns, in the same order
/// Owns    what a job captures lives for as long as its thread, which may be longer than this
/// Errors  deadline_exceeded, resources_exhausted: beside those that the job itself answers
/// Bound   each worker has at most a few jobs; jobs for clients are refused at `off_loop_requests_max`
class OffLoop {
    template <typename Value>
    struct AnswerOf {
        using type = Result<Value>;
    };
    template <typename Value>
    struct AnswerOf<Result<Value>> {
        using type = Result<Value>;
    };

public:
    explicit OffLoop(boost::asio::io_context& io, Deadline::Clock::duration deadline = limits::off_loop_job_deadline,
                     std::size_t stuck_max = limits::off_loop_stuck_max);
    OffLoop(const OffLoop&) = delete;
    OffLoop& operator=(const OffLoop&) = delete;
    /// As `end`.
    ~OffLoop();

    /// `what`  is being done, as the attempt of an error
    /// `done`  is given a Result of what the job returns, or that itself where it is one already
    template <typename Job, typename Done>
    void run(std::string what, Job job, Done done) {
        using Answer = typename AnswerOf<std::invoke_result_t<Job&>>::type;
        const auto answer = std::make_shared<std::optional<Answer>>();
        add(
            std::move(what), [answer, job = std::move(job)]() mutable { answer->emplace(job()); },
            [answer, done = std::move(done)](const Error* given_up) mutable {
                if (given_up != nullptr) return done(Answer{*given_up});
                done(std::move(**answer));
            });
    }

    /// Jobs that wait or run; those that were given up do neither.
    [[nodiscard]] std::size_t waiting() const;
    /// Waits for the running job, not longer than its deadline or `patience`, and drops the others. False: a thread is
    /// stuck and may come back at any time, so nothing that a job was given a reference to may be destroyed: leave by
    /// _Exit().
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
    std::thread thread_;  ///< the present one; started by the first job
    Deadline watch_;      ///< of the running job
};

}  // namespace bulkhead::supervisor

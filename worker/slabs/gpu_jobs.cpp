#include "worker/slabs/gpu_jobs.h"

#include <utility>

#include <fmt/format.h>

namespace bulkhead::worker {

using std::chrono::duration_cast;
using std::chrono::milliseconds;

GpuJobs::GpuJobs(boost::asio::io_context& io, Executor& executor, StatusPage* page, milliseconds deadline,
                 std::function<void(const Error&)> stuck)
    : executor_{executor}, page_{page}, deadline_{deadline}, stuck_{std::move(stuck)},
      next_look_{io, [this] { return look(); }} {}

void GpuJobs::post(std::string what, Executor::Job job) {
    if (!told_) next_look_.no_later_than(Clock::now() + deadline_);
    ++unfinished_;
    executor_.post([this, what = std::move(what), job = std::move(job)] {
        const auto set = [this](std::optional<Running> running) {
            const std::lock_guard lock{mutex_};
            running_ = std::move(running);
        };
        const Clock::time_point now = Clock::now();
        const RunningMark mark{page_, now, what};
        set(Running{what, now});
        Executor::Then then = job();
        set(std::nullopt);
        return [this, then = std::move(then)] {
            if (--unfinished_ == 0) next_look_.cancel();
            then();
        };
    });
}

void GpuJobs::post_wait(std::shared_ptr<const cuda::Gpu> gpu, std::string what) {
    if (!gpu) return;
    post(std::move(what), [gpu = std::move(gpu)] {
        gpu->synchronize();
        return [] {};
    });
}

Clock::time_point GpuJobs::look() {
    const Clock::time_point now = Clock::now();
    std::optional<Running> running;
    {
        const std::lock_guard lock{mutex_};
        running = running_;
    }
    if (!running) return now + deadline_;  // its jobs wait for other ones
    if (now - running->since < deadline_) return running->since + deadline_;
    told_ = true;
    stuck_({ErrorCode::deadline_exceeded,
            fmt::format("{} waits for the GPU for {} ms; a client may have died, or stall, before it recorded an event "
                        "that the GPU waits for",
                        running->what, duration_cast<milliseconds>(now - running->since).count()),
            "the worker ends, and another one takes its place"});
    return never;
}

}  // namespace bulkhead::worker

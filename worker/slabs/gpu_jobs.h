#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include <boost/asio/io_context.hpp>

#include "ipc/base/error.h"
#include "ipc/cuda/gpu.h"
#include "worker/loop/alarm.h"
#include "worker/loop/executor.h"
#include "worker/loop/status_page.h"

namespace bulkhead::worker {

/// Executor jobs that make slabs on the GPU, or wait for its work before slabs are freed.
///
/// The GPU may never end its work: a wait for an event of a client that died before it recorded the
/// event lasts for ever (H200, driver 580), a wait for a client that stalls lasts as long, and no
/// call cancels one. So the first job that has run for `deadline` calls `stuck`, and the process
/// must end.
///
/// Thread  the event loop, which calls no driver: the call might not return either. Must outlive
///         the executor's jobs
class GpuJobs {
public:
    /// `page` may be null. `stuck` is called once.
    GpuJobs(boost::asio::io_context& io, Executor& executor, StatusPage* page, std::chrono::milliseconds deadline,
            std::function<void(const Error&)> stuck);

    /// `what` names the job in the error and on the page: "freeing slabs of channel 3".
    void post(std::string what, Executor::Job job);
    /// Posts a job that waits for all work on the GPU. Post what frees the slabs after it: that
    /// takes long for host slabs, and waits for nothing more. No effect without a GPU.
    void post_wait(std::shared_ptr<const cuda::Gpu> gpu, std::string what);

private:
    [[nodiscard]] Clock::time_point look();

    Executor& executor_;
    StatusPage* const page_;
    const std::chrono::milliseconds deadline_;
    const std::function<void(const Error&)> stuck_;
    bool told_ = false;
    std::size_t unfinished_ = 0;
    Alarm next_look_;  ///< set while jobs are unfinished
    struct Running {
        std::string what;
        Clock::time_point since;
    };
    std::mutex mutex_;
    std::optional<Running> running_;  ///< written by the executor, under the lock
};

}  // namespace bulkhead::worker

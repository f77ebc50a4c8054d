#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include <boost/asio/posix/stream_descriptor.hpp>

#include "supervisor/base/async_mutex.h"
#include "supervisor/base/deadline.h"
#include "supervisor/replica/fleet_context.h"

namespace bulkhead::supervisor {

/// The start of a blank on a GPU: holds the GPU's turn from before the process is started until it has said hello, by
/// which its context is made, and the driver was asked what it holds there.
///
/// Its end leaves the turn to others, and nothing is called any more.
/// Thread  the loop
class ContextStart {
public:
    /// `begun`: it has the turn. Not called within this.
    ContextStart(FleetContext& context, const Device& device, std::function<void()> begun);

    /// What it holds; empty where the driver does not tell.
    /// Errors  deadline_exceeded: it did not say hello
    using OnMade = std::function<void(Result<std::optional<std::uint64_t>>)>;
    /// Called once, not within this, unless the process ends before: its link is readable then, too.
    void watch(const SpawnedProcess& process, OnMade made);

private:
    void read(pid_t pid);

    FleetContext& context_;
    const std::string gpu_uuid_;
    AsyncMutex::Turn turn_;
    boost::asio::posix::stream_descriptor link_;  ///< a duplicate: nothing is read from it
    Deadline deadline_;
    OnMade made_;
    std::shared_ptr<char> alive_ = std::make_shared<char>();
};

/// What a process has of a GPU's memory; empty where the driver does not tell.
[[nodiscard]] std::optional<std::uint64_t> bytes_of_process(const Gpu& gpu, pid_t pid);

}  // namespace bulkhead::supervisor

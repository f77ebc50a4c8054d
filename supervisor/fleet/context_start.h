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

/// The start of a blank on a GPU. Holds the GPU's turn from before the process starts until the blank has
/// said hello, which shows that its context exists, and the driver was asked how much memory the blank holds.
///
/// Destruction passes the turn on; no callback runs after it.
/// Thread  the loop
class ContextStart {
public:
    /// Calls `begun` when it has the turn, never from within the constructor.
    ContextStart(FleetContext& context, const Device& device, std::function<void()> begun);

    /// Receives the GPU memory of the blank; empty if the driver does not report it.
    /// Errors  deadline_exceeded: the blank did not say hello
    using OnMade = std::function<void(Result<std::optional<std::uint64_t>>)>;
    /// Calls `made` once and later. A process that ends makes its link readable too, and so counts as ready here.
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

/// Returns a process' memory on the GPU; empty if the driver does not report it.
[[nodiscard]] std::optional<std::uint64_t> bytes_of_process(const Gpu& gpu, pid_t pid);

}  // namespace bulkhead::supervisor

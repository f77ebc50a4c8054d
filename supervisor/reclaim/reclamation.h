#pragma once

#include <filesystem>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include <boost/asio/io_context.hpp>

#include "supervisor/base/blocking_queue.h"
#include "supervisor/gpu/gpus.h"
#include "supervisor/reclaim/receipt.h"

namespace bulkhead::supervisor {

/// The driver's figures for a worker and its device while the worker lived.
struct GpuShare {
    std::optional<std::uint64_t> free_bytes;          ///< of the device
    std::optional<std::uint64_t> own_bytes;           ///< of the worker and its children;
                                                      ///< empty: not reported
    std::optional<std::uint64_t> unattributed_bytes;  ///< used, but by no listed process; see Gpu
    std::set<pid_t> pids;                             ///< those of the worker and its children that
                                                      ///< the driver lists
};

/// Thread  the thread of `BlockingQueue`: reads environments of other processes
[[nodiscard]] GpuShare share_of(const Gpu& gpu, pid_t worker, const std::string& marker);

/// The traces by which remains of a reaped worker can be found.
struct Trace {
    WorkerName worker;
    pid_t pid = 0;                ///< also its process group
    bool group_empty = false;     ///< as the keeper has seen
    std::string marker;           ///< value of BULKHEAD_WORKER, which its children inherit
    std::string slab_prefix;      ///< prefix of its memfds' labels
    std::string gpu_uuid;         ///< empty on a CPU
    std::optional<GpuShare> gpu;  ///< the last share that listed the worker
    /// `gpu` was taken when the end was requested, so the device's free memory must
    /// have risen since.
    bool gpu_is_recent = false;
    std::filesystem::path cgroup{};  ///< its folder; empty without one
};

/// The result of one look.
struct Remains {
    bool group_empty = false;
    std::vector<Holder> held_by;
    std::optional<std::uint64_t> gpu_free_bytes;
    bool gpu_answered = false;
    bool saw_all = true;  ///< no process was skipped because the kernel does not answer for it
    /// Set by `verify_reclamation`: nothing is held, the GPU's free memory is steady, and every
    /// process could be looked at.
    bool verified = false;
    [[nodiscard]] bool nothing_held() const { return group_empty && held_by.empty(); }
    [[nodiscard]] bool holds(std::string_view what) const;
    [[nodiscard]] std::uint64_t bytes_held(std::string_view what) const;
};

/// Where to look. Reading every process' maps takes milliseconds, so later looks check only what is
/// still awaited.
struct Scope {
    bool processes = true;
    std::vector<pid_t> only;      ///< restricts `processes` to these; empty: all
    std::set<pid_t> gpu_pids;     ///< the worker's, by an earlier look
};

/// Looks once. Processes with the marker have escaped their group: kills them by pidfd and names
/// them until they are gone. For a GPU, names dead processes that the driver still lists and, with
/// pid 0, memory that lost its owner when the worker ended.
/// Thread  the thread of `BlockingQueue`
[[nodiscard]] Remains look_for_remains(const Trace& trace, Gpus& gpus, const Scope& scope = {});

/// What the device got back, and how it is known: "process" if the driver reported the worker's own
/// figure, else "device", the rise of free memory, which other processes change too.
struct GpuReturn {
    std::optional<std::uint64_t> bytes;
    std::string_view by;  ///< empty without bytes
};
[[nodiscard]] GpuReturn gpu_return(const std::optional<GpuShare>& share, std::optional<std::uint64_t> free_before,
                                   const Remains& remains);

/// Looks until nothing of a reaped worker is left and the device's free memory is steady, or
/// `settle_deadline` has passed (`settle_gpu_deadline` if GPU memory is known to be missing).
/// `wait_for_slabs`: true for an unload; false for the restart of a crashed worker, which does not
/// wait for clients that still map its slabs.
/// `done`  receives the result of the last look
void verify_reclamation(boost::asio::io_context& io, BlockingQueue& blocking, Gpus& gpus, Trace trace,
                        bool wait_for_slabs, std::function<void(Remains)> done);

}  // namespace bulkhead::supervisor

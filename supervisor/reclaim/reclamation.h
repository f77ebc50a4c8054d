#pragma once

#include <chrono>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <boost/asio/io_context.hpp>

#include "supervisor/base/deadline.h"
#include "supervisor/base/off_loop.h"
#include "supervisor/gpu/gpus.h"
#include "supervisor/reclaim/receipt.h"

namespace bulkhead::supervisor {

/// What a GPU's driver said of a worker and the device while the worker lived.
struct GpuShare {
    std::optional<std::uint64_t> free_bytes;  ///< of the device
    std::optional<std::uint64_t> own_bytes;   ///< of the worker and its children; empty where the driver does not tell
    std::optional<std::uint64_t> unattributed_bytes;  ///< used, but by nobody who is listed; see Gpu
    std::vector<pid_t> pids;                          ///< the worker and its children, as far as they are listed
};

/// Thread  the off-loop thread: reads environments of processes that are not the worker
[[nodiscard]] GpuShare share_of(const Gpu& gpu, pid_t worker, const std::string& marker);

/// By what a reaped worker could still be found.
struct Trace {
    WorkerName worker;
    pid_t pid = 0;                ///< also its process group
    bool group_empty = false;     ///< the keeper has seen it
    std::string marker;           ///< value of BULKHEAD_WORKER, which its children inherit
    std::string slab_prefix;      ///< of its memfds' labels
    std::string gpu_uuid;         ///< empty on a CPU
    std::optional<GpuShare> gpu;  ///< the last one in which it was listed
    /// That share was taken when its end was asked for, so the device's free memory must have risen since.
    bool gpu_is_recent = false;
    std::filesystem::path cgroup{};  ///< its folder; empty without one
};

/// What one look found.
struct Remains {
    bool group_empty = false;
    std::vector<Holder> held_by;
    std::optional<std::uint64_t> gpu_free_bytes;
    bool gpu_answered = false;
    bool saw_all = true;  ///< no process was left out because the kernel does not answer for it
    [[nodiscard]] bool nothing_held() const { return group_empty && held_by.empty(); }
    [[nodiscard]] bool holds(std::string_view what) const;
    [[nodiscard]] std::uint64_t bytes_held(std::string_view what) const;
};

/// Where to look. Reading every process' maps takes milliseconds, so who waits looks again only at what it waits for.
struct Scope {
    bool processes = true;
    std::vector<pid_t> only;      ///< of the processes; all when empty
    std::vector<pid_t> gpu_pids;  ///< the worker's by an earlier look
};

/// Looks once. Processes that carry the marker have escaped their group: they are killed, by pidfd, and
/// named until they are gone. Of GPUs those are named that the driver lists though they are dead, and, with pid 0,
/// memory that came to be nobody's when the worker ended.
/// Thread  the off-loop thread
[[nodiscard]] Remains look_for_remains(const Trace& trace, Gpus& gpus, const Scope& scope = {});

/// What the device got back, and by whose account: "process" when the driver told the worker's own figure, else
/// "device", the rise of the free memory, in which neighbours have a part.
struct GpuReturn {
    std::optional<std::uint64_t> bytes;
    std::string_view by;  ///< empty without bytes
};
[[nodiscard]] GpuReturn gpu_return(const std::optional<GpuShare>& share, std::optional<std::uint64_t> free_before,
                                   const Remains& remains);

struct Reclaimed {
    Remains remains;      ///< of the last look
    bool settled = true;  ///< the GPU's free memory came to rest, and every process could be looked at
    [[nodiscard]] bool verified() const { return settled && remains.nothing_held(); }
};

/// Looks until nothing of a reaped worker is left and the device's free memory has settled, or
/// `settle_deadline` has passed; `settle_gpu_deadline` when memory of the GPU is known to be missing.
class Reclamation : public std::enable_shared_from_this<Reclamation> {
public:
    using Done = std::function<void(Reclaimed)>;

    /// Who restarts a crashed worker does not wait for clients that still map its slabs: `wait_for_slabs`
    /// false. Who asked for an unload does.
    static void start(boost::asio::io_context& io, OffLoop& off_loop, Gpus& gpus, Trace trace, bool wait_for_slabs,
                      Done done);

private:
    Reclamation(boost::asio::io_context& io, OffLoop& off_loop, Gpus& gpus, Trace trace, bool wait_for_slabs,
                Done done);
    void look();
    void judge(Remains remains);
    void give_up();
    [[nodiscard]] bool gpu_has_settled(const Remains& remains);

    OffLoop& off_loop_;
    Gpus& gpus_;
    std::shared_ptr<const Trace> trace_;
    bool wait_for_slabs_;
    Done done_;
    Deadline::Clock::time_point began_ = Deadline::Clock::now();
    Deadline pause_;
    Scope scope_;
    std::optional<std::uint64_t> free_at_last_look_;
    bool saw_all_ = true;
    Remains last_;  ///< look
};

}  // namespace bulkhead::supervisor

#pragma once

#include <chrono>
#include <functional>
#include <memory>

#include <boost/asio/io_context.hpp>

#include "supervisor/deadline.h"
#include "supervisor/gpus.h"
#include "supervisor/off_loop.h"
#include "supervisor/receipt.h"

namespace bulkhead::supervisor {

/// By what a reaped worker could still be found.
struct Trace {
    WorkerName worker;
    pid_t pid = 0;             ///< also its process group
    bool group_empty = false;  ///< the keeper has seen it
    std::string marker;        ///< value of BULKHEAD_WORKER, which its children inherit
    std::string slab_prefix;   ///< of its memfds' labels
    std::string gpu_uuid;      ///< empty on a CPU
};

/// What one look found.
struct Remains {
    bool group_empty = false;
    std::vector<Holder> held_by;
    std::optional<std::uint64_t> gpu_free_bytes;
    [[nodiscard]] bool nothing_held() const { return group_empty && held_by.empty(); }
};

/// Looks once. Processes that carry the marker have escaped their group: they are killed, by pidfd, and
/// named until they are gone.
/// Thread  the off-loop thread
[[nodiscard]] Remains look_for_remains(const Trace& trace, Gpus& gpus);

struct Reclaimed {
    Remains remains;      ///< of the last look
    bool settled = true;  ///< the GPU's free memory came to rest
    [[nodiscard]] bool verified() const { return settled && remains.nothing_held(); }
};

/// Looks until nothing of a reaped worker is left and the device's free memory has settled, or
/// `settle_deadline` has passed.
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

    OffLoop& off_loop_;
    Gpus& gpus_;
    std::shared_ptr<const Trace> trace_;
    bool wait_for_slabs_;
    Done done_;
    Deadline::Clock::time_point until_;
    Deadline pause_;
    std::optional<std::uint64_t> free_before_;
};

}  // namespace bulkhead::supervisor

#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <boost/json.hpp>

#include "ipc/base/machine_memory.h"

namespace bulkhead::cli::top {

/// One replica, from `fleet.status`.
struct WorkerRow {
    std::string name;  ///< the model's name
    std::uint32_t replica = 0;
    bool alone = true;  ///< its model has no other replica
    std::string state;
    std::string device;
    std::optional<std::uint64_t> bytes;     ///< on its device; without one, on the host
    std::optional<std::uint64_t> allocated;  ///< on a GPU, by torch's allocator, to tensors
    std::optional<std::uint64_t> reserved;   ///< on a GPU, by torch's allocator
    std::optional<std::uint64_t> peak;       ///< on its device, since it began to serve; else the
                                             ///< peak of `reserved`
    double requests_per_s = 0;
    std::optional<double> tokens_per_s;  ///< null unless the model generates
    std::optional<double> p50_ms;        ///< of a request; for a generating model, of a step
    std::optional<double> p99_ms;
    std::uint64_t queued = 0;                 ///< requests in its queue
    std::uint64_t waiting = 0;                ///< callers waiting for it to load
    std::optional<std::int64_t> since_ms;     ///< Unix time of its last state change
    std::optional<std::int64_t> unload_ms;    ///< Unix time of its unload if it stays unused
    std::uint64_t errors = 0;
    std::uint64_t restarts = 0;
    bool pinned = false;
    std::string near;  ///< "near", "far" or empty

    [[nodiscard]] bool is_idle() const { return state == "ready"; }
    [[nodiscard]] std::string title() const { return alone ? name : name + "/" + std::to_string(replica); }
};

/// One part of a device's bar.
struct Part {
    enum class Kind : std::uint8_t { resident, reserved, reclaiming };
    Kind kind{};
    std::string label;  ///< its owner's name
    std::uint64_t bytes = 0;
};

struct DeviceRow {
    std::string name;         ///< "cpu", "cuda:0"
    std::string description;  ///< of a GPU; else empty
    std::uint64_t total = 0;
    std::uint64_t limit = 0;  ///< bytes that the daemon may use; `total` without a limit
    std::uint64_t margin = 0;    ///< kept free for others
    std::uint64_t promised = 0;  ///< freed for others, not taken yet
    std::uint64_t others = 0;
    std::uint64_t blanks = 0;  ///< of processes that wait for a model
    std::vector<Part> parts;  ///< by kind as in `Kind`, in the order of the models
    std::string trouble;      ///< why it is lost, failing or quarantined
    std::optional<double> clock_mhz, power_w, temperature_c, utilization_percent;
    std::vector<std::string> throttled;  ///< reasons

    [[nodiscard]] std::uint64_t sum(Part::Kind kind) const;
    [[nodiscard]] std::uint64_t kept() const { return margin + promised; }
    /// By how much `bytes` that are not for the daemon reduce its share: they take the rest of
    /// the device first.
    [[nodiscard]] std::uint64_t crowding(std::uint64_t bytes) const;
    /// Bytes of the daemon's share in use.
    [[nodiscard]] std::uint64_t used() const;
    /// Bytes that a load could have without ending a blank.
    [[nodiscard]] std::uint64_t free() const;
};

/// The daemon's state that one frame shows.
struct Snapshot {
    std::int64_t time_ms = 0;  ///< Unix time
    std::vector<WorkerRow> workers;
    std::vector<DeviceRow> devices;
};

/// Makes snapshots from the daemon's answers, and rates from its counters.
class Sampler {
public:
    struct Answers {
        boost::json::value status;  ///< of `fleet.status`
        boost::json::value memory;  ///< of `fleet.memory`
        boost::json::value gpus;    ///< of `gpu.status`; null if it was not asked
    };
    /// Returns rates since the last call; 0 in the first call and for a new process.
    /// `machine`  for fleets without limits, for which the daemon keeps no ledger
    [[nodiscard]] Snapshot take(const Answers& answers, MachineMemory machine, std::int64_t time_ms);

private:
    struct Counters {
        std::uint64_t generation = 0;
        std::int64_t time_ms = 0;
        double requests = 0;
        double tokens = 0;
        double requests_per_s = 0;
        double tokens_per_s = 0;
    };
    std::map<std::pair<std::string, std::uint32_t>, Counters> counters_;
};

}  // namespace bulkhead::cli::top

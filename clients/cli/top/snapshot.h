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

/// One replica, as `fleet.status` shows it.
struct WorkerRow {
    std::string name;  ///< of the model
    std::uint32_t replica = 0;
    bool alone = true;  ///< its model has no other replica
    std::string state;
    std::string device;
    std::optional<std::uint64_t> bytes;     ///< of its device; without one, of the host
    std::optional<std::uint64_t> allocated;  ///< by torch's allocator, of a GPU, to tensors
    std::optional<std::uint64_t> reserved;   ///< by torch's allocator, of a GPU
    std::optional<std::uint64_t> peak;       ///< while it served, of its device; where that is not known, reserved
    double requests_per_s = 0;
    std::optional<double> tokens_per_s;  ///< of a model that generates
    std::optional<double> p50_ms;        ///< of a request; of a model that generates, of a step
    std::optional<double> p99_ms;
    std::uint64_t queued = 0;                 ///< requests in its queue
    std::uint64_t waiting = 0;                ///< callers that wait until it is loaded
    std::optional<std::int64_t> since_ms;     ///< Unix time of its state
    std::optional<std::int64_t> unload_ms;    ///< Unix time when it goes, if it is not used before
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
    std::string label;  ///< whose
    std::uint64_t bytes = 0;
};

struct DeviceRow {
    std::string name;         ///< "cpu", "cuda:0"
    std::string description;  ///< of a GPU
    std::uint64_t total = 0;
    std::uint64_t limit = 0;  ///< that the daemon may use; `total` without a limit
    std::uint64_t margin = 0;  ///< kept free for others
    std::uint64_t others = 0;
    std::vector<Part> parts;  ///< resident, reserved, reclaiming, in the order of the models
    std::string trouble;      ///< lost, failing or quarantined: why
    std::optional<double> clock_mhz, power_w, temperature_c, utilization_percent;
    std::vector<std::string> throttled;  ///< by what

    [[nodiscard]] std::uint64_t sum(Part::Kind kind) const;
    /// What others take, and the margin that is kept for them, of what the daemon may use.
    [[nodiscard]] std::uint64_t crowding() const;
    /// That a load could have.
    [[nodiscard]] std::uint64_t free() const;
};

/// All that one frame shows of the daemon.
struct Snapshot {
    std::int64_t time_ms = 0;  ///< Unix time
    std::vector<WorkerRow> workers;
    std::vector<DeviceRow> devices;
};

/// Makes snapshots of the daemon's answers, and rates of its counters.
class Sampler {
public:
    struct Answers {
        boost::json::value status;  ///< of `fleet.status`
        boost::json::value memory;  ///< of `fleet.memory`
        boost::json::value gpus;    ///< of `gpu.status`; null where it was not asked
    };
    /// Rates are those since the last call, 0 in the first and for a new process.
    /// `machine`  for fleets without limits, of which the daemon keeps no ledger
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

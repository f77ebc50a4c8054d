#pragma once

#include <sys/types.h>

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <boost/json.hpp>

#include "supervisor/base/worker_name.h"
#include "supervisor/keeper_link/keeper.h"

namespace bulkhead::supervisor {

/// A process that still holds memory of a dead worker.
struct Holder {
    pid_t pid = 0;     ///< 0: GPU memory for which the driver lists no process
    std::string name;  ///< escaped
    std::uint64_t bytes = 0;
    std::string_view what;  ///< "slab", "process", "gpu" or "gpu_slab"
    friend bool operator==(const Holder&, const Holder&) = default;
};

enum class Ended : std::uint8_t { drained, terminated, killed, crashed };
inline constexpr std::array<std::string_view, 4> ended_names{"drained", "terminated", "killed", "crashed"};
constexpr std::string_view to_string(Ended ended) { return ended_names[static_cast<std::size_t>(ended)]; }

/// What a worker gave back. Every member is an observation.
struct Receipt {
    WorkerName worker;
    pid_t pid = 0;
    Ended ended = Ended::crashed;
    ProcessExit exit;
    std::int64_t ms = 0;  ///< from the request, or the first sign of death, until memory was
                          ///< verified to be back
    std::optional<std::uint64_t> host_bytes;  ///< held shortly before its end and freed by it;
                                              ///< empty: never read
    std::optional<std::uint64_t> gpu_bytes;   ///< returned to the device; empty without a
                                              ///< GPU, or if unknown
    std::string_view gpu_bytes_by;            ///< "process", "device", or empty without `gpu_bytes`
    bool verified = false;
    std::vector<Holder> held_by;
};

[[nodiscard]] boost::json::object to_json(const ProcessExit& exit);
[[nodiscard]] boost::json::object to_json(const Receipt& receipt);
/// One line for the daemon's log.
[[nodiscard]] std::string text_of(const Receipt& receipt);

}  // namespace bulkhead::supervisor

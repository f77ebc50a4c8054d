#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "supervisor/gpu/nvml.h"

namespace bulkhead::supervisor {

/// The machine's GPUs at the last reading. The first reading opens NVML, so a CPU fleet
/// never pays for it.
///
/// A thread of its own asks the driver, which may block forever. A caller waits
/// `gpu_answer_deadline` once; then callers get an error at once until the driver has answered.
///
/// Thread  `read`: the thread of `BlockingQueue`; `events`: any
class Gpus {
public:
    Gpus();
    ~Gpus();
    Gpus(const Gpus&) = delete;
    Gpus& operator=(const Gpus&) = delete;

    /// Errors  not_running: why there is no NVML; resources_exhausted, deadline_exceeded: the
    ///         driver does not answer
    [[nodiscard]] Result<std::vector<Gpu>> read();
    /// Empty if this GPU does not answer.
    [[nodiscard]] std::optional<Gpu> read(const std::string& uuid);

    /// Returns the errors that the driver reported for a GPU at `since_unix_ms` or later and that a
    /// reading has seen: "Xid 31 at 12:00:01 UTC (MMU fault: an illegal address was accessed)".
    [[nodiscard]] std::vector<std::string> events(const std::string& uuid, std::int64_t since_unix_ms) const;

private:
    struct Reader;
    std::shared_ptr<Reader> reader_;
};

/// Where a worker runs.
struct Device {
    std::string text = "cpu";  ///< "cpu" or "cuda:0"
    std::string uuid;          ///< empty on a CPU
    [[nodiscard]] bool is_gpu() const noexcept { return !uuid.empty(); }
};

/// `declared`: "cpu", "cuda:N", a GPU's UUID, or `auto`: the GPU with the most free memory that has
/// no trouble and no quarantine, or the CPU on a machine without NVML or GPUs. `quarantined` has
/// reasons by UUID.
/// Errors  config_invalid with the devices there are; resources_exhausted: quarantined, lost or not
///         answering, which may pass
/// Thread  the thread of `BlockingQueue`
[[nodiscard]] Result<Device> place(Gpus& gpus, const std::string& declared,
                                   const std::map<std::string, std::string>& quarantined = {});

}  // namespace bulkhead::supervisor

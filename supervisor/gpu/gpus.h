#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "ipc/base/error.h"

namespace bulkhead::supervisor {

struct GpuProcess {
    std::int64_t pid = 0;
    std::optional<std::uint64_t> bytes;  ///< empty if the driver does not report it
};

/// What a GPU reports beside its memory; empty if the driver does not report it.
struct GpuSensors {
    std::optional<unsigned> clock_mhz;  ///< of the multiprocessors
    std::optional<unsigned> power_mw;
    std::optional<unsigned> temperature_c;
    std::optional<unsigned> utilization_percent;  ///< of the time since the driver's last sample
    std::vector<std::string_view> throttled;      ///< what holds its clock down now
};

struct Gpu {
    unsigned index = 0;
    std::string uuid;                          ///< "GPU-…"; empty for a GPU that never answered
    std::string name;                          ///< escaped
    std::string trouble;                       ///< "lost: GPU is lost"; empty while it answers
    bool lost = false;                         ///< permanently: fallen off the bus
    std::optional<std::uint64_t> total_bytes;  ///< empty if not reported, or the GPU
                                               ///< does not answer
    std::optional<std::uint64_t> free_bytes;
    bool processes_known = false;
    std::vector<GpuProcess> processes;  ///< compute and graphics, each process once
    GpuSensors sensors{};

    /// Finds a listed process, with or without a memory figure.
    [[nodiscard]] const GpuProcess* find(std::int64_t pid) const;
    /// Used memory that no listed process accounts for: the driver's own, and memory of dead
    /// processes that is not freed yet. Empty unless the driver reports all figures.
    [[nodiscard]] std::optional<std::uint64_t> unattributed_bytes() const;
};

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

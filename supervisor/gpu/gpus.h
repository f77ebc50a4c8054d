#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "supervisor/gpu/nvml.h"

namespace bulkhead::supervisor {

/// The machine's GPUs as last asked. NVML is opened by the first question, so a CPU fleet never pays for it.
///
/// The driver is asked on a thread of its own, because it may block for as long as it likes, even for ever: who asks
/// waits `gpu_answer_deadline` once, and from then on gets an error at once, until the driver has answered.
///
/// Thread  `read`: the off-loop thread; `events`: any
class Gpus {
public:
    Gpus();
    ~Gpus();
    Gpus(const Gpus&) = delete;
    Gpus& operator=(const Gpus&) = delete;

    /// Errors  not_running: why there is no NVML; resources_exhausted, deadline_exceeded: the driver answers nothing
    [[nodiscard]] Result<std::vector<Gpu>> read();
    /// Empty when this GPU does not answer.
    [[nodiscard]] std::optional<Gpu> read(const std::string& uuid);

    /// Errors that the driver reported of a GPU at `since_unix_ms` or later, as far as they were seen by a reading:
    /// "Xid 31 at 12:00:01 UTC (MMU fault: an illegal address was accessed)".
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

/// `auto` is the GPU with the most free memory that is neither in trouble nor quarantined, or the CPU on a machine
/// without NVML or GPUs; else "cpu", "cuda:N" or a GPU's UUID. `quarantined` gives reasons by UUID.
/// Errors  config_invalid naming what there is; resources_exhausted: it is quarantined, lost or does not answer,
///         which may pass
/// Thread  the off-loop thread
[[nodiscard]] Result<Device> place(Gpus& gpus, const std::string& declared,
                                   const std::map<std::string, std::string>& quarantined = {});

}  // namespace bulkhead::supervisor

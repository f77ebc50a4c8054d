#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "supervisor/nvml.h"

namespace bulkhead::supervisor {

/// The machine's GPUs as last asked. NVML is opened by the first question, so a CPU fleet never pays for it.
///
/// Thread  the off-loop thread alone
class Gpus {
public:
    /// Errors  not_running: why there is no NVML
    [[nodiscard]] Result<std::vector<Gpu>> read();
    /// Empty when this GPU does not answer.
    [[nodiscard]] std::optional<Gpu> read(const std::string& uuid);

private:
    std::unique_ptr<Nvml> nvml_;
};

/// Where a worker runs.
struct Device {
    std::string text = "cpu";  ///< "cpu" or "cuda:0"
    std::string uuid;          ///< empty on a CPU
    [[nodiscard]] bool is_gpu() const noexcept { return !uuid.empty(); }
};

/// `auto` is the GPU with the most free memory, or the CPU where there is none; else "cpu", "cuda:N" or a
/// GPU's UUID.
/// Errors  config_invalid naming what there is
/// Thread  the off-loop thread
[[nodiscard]] Result<Device> place(Gpus& gpus, const std::string& declared);

}  // namespace bulkhead::supervisor

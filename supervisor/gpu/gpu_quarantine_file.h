#pragma once

#include <filesystem>
#include <optional>

#include "supervisor/gpu/gpu_quarantine.h"
#include "supervisor/keeper_link/keeper_file.h"

namespace bulkhead::supervisor {

/// Quarantined GPUs, and failures that count against others, in a file beside the logs: a new
/// supervisor does not repair a GPU.
///
/// Format  {"keeper", "reasons": {UUID: [{"text", "process"?}]}, "failures": {UUID: [{"model", "unix_ms"}]}};
///         `process`: pid and start time of a process that holds the GPU
class GpuQuarantineFile {
public:
    explicit GpuQuarantineFile(const std::filesystem::path& folder);

    /// On a full disk, logs a line.
    void save(const GpuQuarantine::State& state) const;
    /// Leaves out reasons whose process has ended, and failures too old to count. Empty if there is
    /// no file of this keeper, or it is corrupt (logs a warning).
    [[nodiscard]] std::optional<GpuQuarantine::State> load() const;

private:
    KeeperFile file_;
};

}  // namespace bulkhead::supervisor

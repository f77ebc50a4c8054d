#pragma once

#include <filesystem>
#include <optional>

#include "supervisor/gpu/gpu_quarantine.h"
#include "supervisor/keeper_link/keeper_file.h"

namespace bulkhead::supervisor {

/// Which GPUs are quarantined and what counts against others, in a file beside the logs: a GPU does not get well by the
/// end of a supervisor.
///
/// Format  {"keeper", "reasons": {UUID: [{"text", "process"?}]}, "failures": {UUID: [{"model", "unix_ms"}]}};
///         `process` is the pid and start of one that holds the GPU
class GpuQuarantineFile {
public:
    explicit GpuQuarantineFile(const std::filesystem::path& folder);

    /// A disk that is full costs a line in the log.
    void save(const GpuQuarantine::State& state) const;
    /// Without reasons whose process has ended meanwhile, and failures that are too old to count. Empty when there is
    /// no file of this keeper, or, with a warning in the log, when it is corrupt.
    [[nodiscard]] std::optional<GpuQuarantine::State> load() const;

private:
    KeeperFile file_;
};

}  // namespace bulkhead::supervisor

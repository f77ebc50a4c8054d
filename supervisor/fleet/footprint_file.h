#pragma once

#include <filesystem>
#include <memory>

#include "supervisor/keeper_link/keeper_file.h"
#include "supervisor/log/log_writer.h"
#include "supervisor/memory/footprint.h"

namespace bulkhead::supervisor {

/// Measured footprints of models, in `footprints.json` beside the logs. Later daemons use them too.
class FootprintFile {
public:
    explicit FootprintFile(const LogStore& logs);

    /// Blocks for the disk.
    [[nodiscard]] memory::Footprints load() const;
    /// Writes later, on the log writer's thread. On a full disk, logs a line and loses the measurement.
    void save(const memory::Footprints& footprints) const;

private:
    KeeperFile file_;
    std::shared_ptr<LogWriter> writer_;
};

}  // namespace bulkhead::supervisor

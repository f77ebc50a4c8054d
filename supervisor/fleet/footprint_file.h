#pragma once

#include <filesystem>
#include <memory>

#include "supervisor/keeper_link/keeper_file.h"
#include "supervisor/log/log_writer.h"
#include "supervisor/memory/footprint.h"

namespace bulkhead::supervisor {

/// What was measured of models, in `footprints.json` beside the logs: of use to later daemons too.
class FootprintFile {
public:
    explicit FootprintFile(const LogStore& logs);

    /// Blocks for the disk.
    [[nodiscard]] memory::Footprints load() const;
    /// Later, on the log writer's thread. A disk that is full costs a line in the log, and a measurement.
    void save(const memory::Footprints& footprints) const;

private:
    KeeperFile file_;
    std::shared_ptr<LogWriter> writer_;
};

}  // namespace bulkhead::supervisor

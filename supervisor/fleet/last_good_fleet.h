#pragma once

#include <filesystem>
#include <optional>

#include "config/fleet.h"
#include "supervisor/keeper_link/keeper_file.h"

namespace bulkhead::supervisor {

/// The fleet that a supervisor last read without errors, complete, in a file beside the logs. If a supervisor
/// starts while the fleet file has errors, it uses this one: a typing error must not end running workers.
class LastGoodFleet {
public:
    explicit LastGoodFleet(const std::filesystem::path& folder);

    /// On a full disk, logs a line.
    void save(const config::Fleet& fleet) const;
    [[nodiscard]] std::optional<config::Fleet> load() const;

private:
    KeeperFile file_;
};

}  // namespace bulkhead::supervisor

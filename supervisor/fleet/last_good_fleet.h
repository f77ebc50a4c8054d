#pragma once

#include <filesystem>
#include <optional>

#include "config/fleet.h"
#include "supervisor/keeper_link/keeper_file.h"

namespace bulkhead::supervisor {

/// The fleet as a supervisor last read it without errors, complete, in a file beside the logs. A supervisor that is
/// started while the fleet file has errors goes on with it: a typing error must not end what runs.
class LastGoodFleet {
public:
    explicit LastGoodFleet(const std::filesystem::path& folder);

    /// A disk that is full costs a line in the log.
    void save(const config::Fleet& fleet) const;
    [[nodiscard]] std::optional<config::Fleet> load() const;

private:
    KeeperFile file_;
};

}  // namespace bulkhead::supervisor

#pragma once

#include <filesystem>
#include <optional>
#include <string>

#include "config/fleet.h"

namespace bulkhead::supervisor {

/// The fleet as a supervisor last read it without errors, complete, in a file beside the logs. A supervisor that is
/// started while the fleet file has errors goes on with it: a typing error must not end what runs.
///
/// Only of use under the keeper that it was written under: what another daemon once ran is not what to run now.
class LastGoodFleet {
public:
    /// The keeper is the parent of the calling process.
    explicit LastGoodFleet(const std::filesystem::path& folder);

    /// Replaces the file whole or not at all; a disk that is full costs a line in the log.
    void save(const config::Fleet& fleet) const;
    [[nodiscard]] std::optional<config::Fleet> load() const;

private:
    std::filesystem::path path_;
    std::string keeper_;  ///< pid and start time, which an upgrade in place keeps
};

}  // namespace bulkhead::supervisor

#pragma once

#include <filesystem>
#include <optional>

#include "config/reader.h"
#include "supervisor/keeper_link/keeper_file.h"
#include "supervisor/memory/footprint.h"

namespace bulkhead::supervisor {

/// Measured footprints of models, in `footprints.json` beside the logs. Later daemons use them too.
inline KeeperFile footprint_file(const std::filesystem::path& folder) {
    return {folder / "footprints.json", "the next daemon measures again", KeeperFile::Of::every_keeper};
}

/// Blocks for the disk.
inline memory::Footprints read_footprints(const std::filesystem::path& folder) {
    const auto content = footprint_file(folder).load();
    const json::value* known = content ? content->if_contains("footprints") : nullptr;
    return known == nullptr ? memory::Footprints{} : memory::Footprints::from_json(*known);
}

/// The fleet that a supervisor last read without errors, its text, in a file beside the logs. If a
/// supervisor starts while the fleet file has errors, it uses this one: a typing error must not end
/// running workers.
inline KeeperFile last_good_fleet_file(const std::filesystem::path& folder) {
    return {folder / "last-good-fleet.json",
            "if the fleet file gets errors, a new supervisor cannot continue without it"};
}
void save_last_good_fleet(const std::filesystem::path& folder, const config::ReadFleet& read);
[[nodiscard]] std::optional<config::Fleet> load_last_good_fleet(const std::filesystem::path& folder);

}  // namespace bulkhead::supervisor

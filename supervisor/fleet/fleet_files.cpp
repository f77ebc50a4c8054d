#include "supervisor/fleet/fleet_files.h"

namespace bulkhead::supervisor {

void save_last_good_fleet(const std::filesystem::path& folder, const config::ReadFleet& read) {
    last_good_fleet_file(folder).save({{"source", read.fleet.source.string()}, {"text", read.text}});
}

std::optional<config::Fleet> load_last_good_fleet(const std::filesystem::path& folder) {
    const auto content = last_good_fleet_file(folder).load();
    const auto source = content ? member<std::string>(*content, "source") : std::nullopt;
    const auto text = content ? member<std::string>(*content, "text") : std::nullopt;
    if (!source || !text) return std::nullopt;
    auto read = config::read_fleet_text(*text, *source, config::FileCheck::none);
    return read.ok() ? std::optional{std::move(read.fleet)} : std::nullopt;
}

}  // namespace bulkhead::supervisor

#include "supervisor/fleet/fleet_files.h"

namespace bulkhead::supervisor {

LastGoodFleet::LastGoodFleet(const std::filesystem::path& folder)
    : file_{folder / "last-good-fleet.json",
            "if the fleet file gets errors, a new supervisor cannot continue without it"} {}

void LastGoodFleet::save(const config::ReadFleet& read) const {
    file_.save({{"source", read.fleet.source.string()}, {"text", read.text}});
}

std::optional<config::Fleet> LastGoodFleet::load() const {
    const auto content = file_.load();
    const auto source = content ? member<std::string>(*content, "source") : std::nullopt;
    const auto text = content ? member<std::string>(*content, "text") : std::nullopt;
    if (!source || !text) return std::nullopt;
    auto read = config::read_fleet_text(*text, *source, config::FileCheck::none);
    return read.ok() ? std::optional{std::move(read.fleet)} : std::nullopt;
}

}  // namespace bulkhead::supervisor

#include "supervisor/fleet/fleet_files.h"

#include "config/fleet_json.h"

namespace bulkhead::supervisor {

LastGoodFleet::LastGoodFleet(const std::filesystem::path& folder)
    : file_{folder / "last-good-fleet.json",
            "if the fleet file gets errors, a new supervisor cannot continue without it"} {}

void LastGoodFleet::save(const config::Fleet& fleet) const {
    json::array models;
    for (const auto& model : fleet.models) models.push_back(config::to_json(model));
    json::object all = config::fleet_settings_to_json(fleet);
    all["source"] = fleet.source.string();
    all["models"] = std::move(models);
    file_.save(std::move(all));
}

std::optional<config::Fleet> LastGoodFleet::load() const {
    const auto content = file_.load();
    const auto models = content ? member<std::vector<json::object>>(*content, "models") : std::nullopt;
    if (!models) return std::nullopt;
    config::Fleet fleet;
    fleet.source = member<std::string>(*content, "source").value_or("");
    for (const json::object& one : *models) {
        auto model = config::model_from_json(one);
        if (!model) return std::nullopt;
        fleet.models.push_back(std::move(*model));
    }
    if (!config::fleet_settings_from_json(*content, fleet)) return std::nullopt;
    return fleet;
}

}  // namespace bulkhead::supervisor

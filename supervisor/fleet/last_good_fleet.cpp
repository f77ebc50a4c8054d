#include "supervisor/fleet/last_good_fleet.h"

#include <spdlog/spdlog.h>

#include "config/fleet_json.h"

namespace bulkhead::supervisor {

LastGoodFleet::LastGoodFleet(const std::filesystem::path& folder) : file_{folder / "last-good-fleet.json"} {}

void LastGoodFleet::save(const config::Fleet& fleet) const {
    json::array models;
    for (const auto& model : fleet.models) models.push_back(config::to_json(model));
    json::object all = config::fleet_settings_to_json(fleet);
    all["source"] = fleet.source.string();
    all["models"] = std::move(models);
    if (const auto saved = file_.save(all); !saved)
        spdlog::warn("{}; if the fleet file gets errors, a new supervisor cannot continue without it",
                     saved.error().attempt);
}

std::optional<config::Fleet> LastGoodFleet::load() const {
    const auto content = file_.load();
    const json::value* models = content ? content->if_contains("models") : nullptr;
    if (models == nullptr || !models->is_array()) return std::nullopt;
    config::Fleet fleet;
    fleet.source = member<std::string>(*content, "source").value_or("");
    for (const json::value& one : models->get_array()) {
        auto model = one.is_object() ? config::model_from_json(one.get_object())
                                     : Result<config::ModelSpec>{Error{ErrorCode::config_invalid, "no object", {}}};
        if (!model) return std::nullopt;
        fleet.models.push_back(std::move(*model));
    }
    if (!config::fleet_settings_from_json(*content, fleet)) return std::nullopt;
    return fleet;
}

}  // namespace bulkhead::supervisor

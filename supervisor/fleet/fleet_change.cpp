#include "supervisor/fleet/fleet_change.h"

#include <algorithm>

namespace bulkhead::supervisor {
namespace {

const config::ModelSpec* find(const config::Fleet& fleet, const std::string& name) {
    const auto found = std::ranges::find(fleet.models, name, &config::ModelSpec::name);
    return found == fleet.models.end() ? nullptr : &*found;
}

}  // namespace

FleetChange compare(const config::Fleet& from, const config::Fleet& to,
                    const std::vector<std::string>& replaced_files) {
    FleetChange change;
    change.limits_changed = from.limits != to.limits || from.startup != to.startup || from.blanks != to.blanks ||
                            from.near_bytes != to.near_bytes;
    for (const config::ModelSpec& model : from.models)
        if (find(to, model.name) == nullptr) change.removed.push_back(model.name);
    for (const config::ModelSpec& model : to.models) {
        const config::ModelSpec* former = find(from, model.name);
        const bool replaced = std::ranges::find(replaced_files, model.name) != replaced_files.end();
        if (former == nullptr)
            change.added.push_back(model.name);
        else if (*former != model || replaced)
            change.changed.push_back(model.name);
        else
            change.unchanged.push_back(model.name);
    }
    return change;
}

}  // namespace bulkhead::supervisor

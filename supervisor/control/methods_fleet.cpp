#include <fmt/format.h>

#include "supervisor/control/methods.h"

namespace bulkhead::supervisor {
namespace {

void fleet_status(Fleet& fleet, rpc::Call call) {
    fleet.status([answer = std::move(call.answer)](json::array rows) {
        answer(rpc::Answer{{{"models", std::move(rows)}}, {}});
    });
}

json::array names(const std::vector<std::string>& models) {
    json::array list;
    for (const auto& model : models) list.emplace_back(model);
    return list;
}

rpc::Answer refusal(const std::string& file, const std::vector<config::Diagnostic>& errors) {
    json::array list;
    for (const auto& one : errors)
        list.push_back(json::object{{"file", one.file.string()},
                                    {"line", one.line},
                                    {"column", one.column},
                                    {"code", to_string(one.error.code)},
                                    {"attempt", one.error.attempt},
                                    {"remedy", one.error.remedy}});
    rpc::Answer answer{{{"errors", std::move(list)}}, {}};
    answer.error = Error{ErrorCode::config_invalid,
                         fmt::format("reloading {}: {}{}", file, errors.front().text(),
                                     errors.size() > 1 ? fmt::format(", and {} more", errors.size() - 1) : ""),
                         "mend the file and reload again; until then the fleet stays as it was"};
    return answer;
}

void reload(const Daemon& daemon, rpc::Call call) {
    daemon.reload([answer = std::move(call.answer), file = daemon.facts.fleet_file](const Reloaded& reloaded) {
        if (!reloaded.errors.empty()) return answer(refusal(file, reloaded.errors));
        if (reloaded.refused) return answer(*reloaded.refused);
        const FleetChange& change = reloaded.change;
        answer(rpc::Answer{{{"added", names(change.added)},
                            {"removed", names(change.removed)},
                            {"changed", names(change.changed)},
                            {"unchanged", names(change.unchanged)}},
                           {}});
    });
}

}  // namespace

void add_fleet_methods(rpc::MethodTable& methods, Daemon& daemon) {
    methods["fleet.status"] =
        rpc::method({}, [&daemon](rpc::Call call) { fleet_status(daemon.fleet, std::move(call)); });
    methods["fleet.reload"] = rpc::method({}, [&daemon](rpc::Call call) { reload(daemon, std::move(call)); });
}

}  // namespace bulkhead::supervisor

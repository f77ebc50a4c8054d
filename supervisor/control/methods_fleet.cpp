#include <fmt/format.h>

#include "config/fleet_json.h"
#include "supervisor/control/methods.h"

namespace bulkhead::supervisor {
namespace {

constexpr std::uint64_t bytes_max = std::uint64_t{1} << 40;

void status(Fleet& fleet, rpc::Call call) {
    fleet.status([answer = std::move(call.answer)](json::array rows) {
        answer(json::object{{"models", std::move(rows)}});
    });
}

rpc::Answer refusal(const std::string& file, const std::vector<config::Diagnostic>& errors) {
    rpc::Answer answer{{{"errors", config::to_json(errors)}}};
    answer.error = Error{ErrorCode::config_invalid,
                         fmt::format("reloading {}: {}{}", file, errors.front().text(),
                                     errors.size() > 1 ? fmt::format(", and {} more", errors.size() - 1) : ""),
                         "correct the file and reload again; until then the fleet stays as it was"};
    return answer;
}

void reload(const Daemon& daemon, rpc::Call call) {
    daemon.reload([answer = std::move(call.answer), file = daemon.facts.fleet_file](const Reloaded& reloaded) {
        if (!reloaded.errors.empty()) return answer(refusal(file, reloaded.errors));
        if (reloaded.refused) return answer(*reloaded.refused);
        const FleetChange& change = reloaded.change;
        answer(json::object{{"added", json::value_from(change.added)},
                            {"removed", json::value_from(change.removed)},
                            {"changed", json::value_from(change.changed)},
                            {"unchanged", json::value_from(change.unchanged)}});
    });
}

void plan(const Fleet& fleet, const rpc::Call& call) {
    const std::string& name = selected_model(call.params, fleet).spec.name;
    require_plan(fleet, name);
    call.answer(fleet.admission().plan(name));
}

void reclaim(Fleet& fleet, rpc::Call call) {
    const std::string device = rpc::required_string(call.params, "device");
    const std::string client = rpc::required_string(call.params, "client");
    const auto bytes = rpc::optional_count(call.params, "bytes", bytes_max);
    if (!bytes)
        throw ErrorException{
            {ErrorCode::input_invalid, "parameter \"bytes\" is missing", "say how much room is needed"}};
    const auto deadline = selected_deadline(call.params);
    auto answer = rpc::answer_of<Admission::MadeRoom>(call, [](const Admission::MadeRoom& made) {
        return json::object{{"freed", made.freed}, {"receipts", to_json(made.receipts)}, {"short_of", made.short_of}};
    });
    const auto ticket = fleet.admission().make_room(device, *bytes, client, deadline, std::move(answer));
    *call.client_left = [&fleet, ticket] { fleet.admission().leave(ticket); };
}

void ledger(Fleet& fleet, const rpc::Call& call) {
    fleet.blanks().sample();  // for the next call
    call.answer(json::object{{"devices", fleet.admission().ledger()},
                             {"blanks_on_host", fleet.blanks().bytes(std::string{memory::host})}});
}

}  // namespace

void add_fleet_methods(rpc::MethodTable& methods, Daemon& daemon) {
    rpc::add(methods, "fleet.status", {}, daemon.fleet, status);
    rpc::add(methods, "fleet.reload", {}, daemon, reload);
    rpc::add(methods, "fleet.plan", {"model"}, daemon.fleet, plan);
    rpc::add(methods, "fleet.reclaim", {"device", "bytes", "client", "deadline_ms"}, daemon.fleet, reclaim);
    rpc::add(methods, "fleet.memory", {}, daemon.fleet, ledger);
}

}  // namespace bulkhead::supervisor

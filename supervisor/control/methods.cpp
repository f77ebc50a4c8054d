#include "supervisor/control/methods.h"

#include <fmt/format.h>

namespace bulkhead::supervisor {

rpc::MethodTable make_methods(Daemon& daemon) {
    rpc::MethodTable methods;
    add_fleet_methods(methods, daemon);
    add_model_methods(methods, daemon.fleet);
    add_report_methods(methods, daemon.fleet);
    add_gpu_methods(methods, daemon.fleet);
    add_daemon_methods(methods, daemon);
    return methods;
}

Model& selected_model(const json::object& params, const Fleet& fleet) {
    return *fleet.find(rpc::required_string(params, "model")).value();
}

Fleet::Models selected_models(const json::object& params, const Fleet& fleet) {
    const bool all = rpc::flag(params, "all");
    const auto named = rpc::optional_strings(params, "models");
    const int ways = (all ? 1 : 0) + (named ? 1 : 0) + (params.contains("model") ? 1 : 0);
    if (ways != 1)
        throw ErrorException{{ErrorCode::input_invalid, fmt::format("naming models in {} ways", ways),
                              R"(give one of {"model": "A"}, {"models": ["A", "B"]}, {"all": true})"}};
    if (all) return fleet.all();
    if (!named) return {&selected_model(params, fleet)};
    Fleet::Models models;
    for (const auto& name : *named) models.push_back(fleet.find(name).value());
    return models;
}

void require_plan(const Fleet& fleet, const std::string& model) {
    if (fleet.admission().plans(model)) return;
    throw ErrorException{{ErrorCode::input_invalid,
                          fmt::format("model {} starts when it is asked to: its device has no limit", model),
                          "declare `limits` in the fleet file, and reload"}};
}

std::optional<std::chrono::milliseconds> selected_deadline(const json::object& params) {
    constexpr std::uint64_t day_ms = 86'400'000;
    const auto ms = rpc::optional_count(params, "deadline_ms", day_ms);
    return ms ? std::optional{std::chrono::milliseconds{*ms}} : std::nullopt;
}

json::array to_json(const std::vector<Receipt>& receipts) {
    json::array array;
    for (const Receipt& receipt : receipts) array.push_back(to_json(receipt));
    return array;
}

json::array to_json(const std::vector<LoadedReplica>& loaded) {
    json::array array;
    for (const LoadedReplica& one : loaded)
        array.push_back(json::object{{"model", one.worker.model},
                                     {"replica", one.worker.replica},
                                     {"state", to_string(one.state)},
                                     {"pid", one.pid},
                                     {"ms", one.ms}});
    return array;
}

void read_gpus(FleetContext& context, std::function<void(Result<std::vector<Gpu>>)> done) {
    context.blocking.run_for_client(
        "reading the GPUs", [&gpus = context.gpus] { return gpus.read(); }, std::move(done));
}

}  // namespace bulkhead::supervisor

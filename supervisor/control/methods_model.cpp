#include <algorithm>

#include <fmt/format.h>

#include "supervisor/control/methods.h"

namespace bulkhead::supervisor {
namespace {

void load(Fleet& fleet, rpc::Call call) {
    const Fleet::Models models = selected_models(call.params, fleet);
    const auto deadline = selected_deadline(call.params);
    // A repeated load shares the one under way: `again` changes nothing.
    (void)rpc::flag(call.params, "again");
    fleet.load(
        models, deadline,
        [answer = std::move(call.answer)](Result<std::vector<LoadedReplica>> loaded) {
            if (!loaded) return answer(loaded.error());
            answer(rpc::Answer{{{"models", to_json(*loaded)}}, {}});
        },
        call.client_left.get());
}

void pin(Fleet& fleet, const rpc::Call& call) {
    const std::string& name = selected_model(call.params, fleet).spec.name;
    const bool shall = rpc::flag(call.params, "pin", true);
    require_plan(fleet, name);
    fleet.admission().pin(name, shall);
    call.answer(rpc::Answer{{{"model", name}, {"pin", shall}}, {}});
}

void unload(Fleet& fleet, rpc::Call call) {
    const Fleet::Models models = selected_models(call.params, fleet);
    const bool again = rpc::flag(call.params, "again");
    fleet.unload(
        models,
        [answer = std::move(call.answer)](Result<std::vector<Receipt>> receipts) {
            if (!receipts) return answer(receipts.error());
            answer(rpc::Answer{{{"receipts", to_json(*receipts)}}, {}});
        },
        again);
}

void restart(Fleet& fleet, rpc::Call call) {
    const Fleet::Models models = selected_models(call.params, fleet);
    fleet.restart(models, [answer = std::move(call.answer)](Result<Fleet::Restarted> restarted) {
        if (!restarted) return answer(restarted.error());
        answer(rpc::Answer{{{"models", to_json(restarted->loaded)}, {"receipts", to_json(restarted->receipts)}}, {}});
    });
}

/// `why` is asked about trouble: the first replica that does not serve speaks for the model.
const Replica& spokesman(const Model& model) {
    const auto troubled = std::find_if(model.replicas.begin(), model.replicas.end(),
                                       [](const auto& replica) { return !is_serving(replica->state()); });
    return troubled == model.replicas.end() ? *model.replicas.front() : **troubled;
}

std::string sentence_of(const std::string& memory, const Replica& speaks) {
    return memory.empty() ? speaks.sentence() : fmt::format("{} Memory: {}.", speaks.sentence(), memory);
}

rpc::Answer why_of(const Fleet& fleet, const Model& model) {
    const std::string& name = model.spec.name;
    json::array replicas;
    for (const auto& replica : model.replicas) replicas.push_back(replica->why());
    const Replica& speaks = spokesman(model);
    return {{{"model", name},
             {"state", to_string(speaks.state())},
             {"sentence", sentence_of(fleet.admission().why(name), speaks)},
             {"memory", fleet.admission().footprint(speaks)},
             {"replicas", std::move(replicas)},
             {"graphs", speaks.graphs()},
             {"generate", speaks.generate()}},
            {}};
}

void why(Fleet& fleet, const rpc::Call& call) {
    const Model& model = selected_model(call.params, fleet);
    const bool works = std::ranges::any_of(model.replicas, [](const auto& replica) {
        return replica->state() == WorkerState::busy || !replica->generate().is_null();
    });
    if (!works) return call.answer(why_of(fleet, model));
    // First refresh the counts that change with each request or token, as `fleet.status` does.
    fleet.status([&fleet, name = model.spec.name, answer = call.answer](const json::array&) {
        const auto still = fleet.find(name);
        if (!still) return answer(still.error());
        answer(why_of(fleet, **still));
    });
}

}  // namespace

void add_model_methods(rpc::MethodTable& methods, Fleet& fleet) {
    methods["model.load"] = rpc::method({"model", "models", "all", "deadline_ms", "again"},
                                        [&fleet](rpc::Call call) { load(fleet, std::move(call)); });
    methods["model.unload"] =
        rpc::method({"model", "models", "all", "again"}, [&fleet](rpc::Call call) { unload(fleet, std::move(call)); });
    methods["model.restart"] =
        rpc::method({"model", "models", "all"}, [&fleet](rpc::Call call) { restart(fleet, std::move(call)); });
    methods["model.pin"] = rpc::method({"model", "pin"}, [&fleet](const rpc::Call& call) { pin(fleet, call); });
    methods["model.why"] = rpc::method({"model"}, [&fleet](const rpc::Call& call) { why(fleet, call); });
}

}  // namespace bulkhead::supervisor

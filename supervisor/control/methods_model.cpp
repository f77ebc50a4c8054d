#include <algorithm>

#include <fmt/format.h>

#include "supervisor/control/methods.h"

namespace bulkhead::supervisor {
namespace {

void load(Fleet& fleet, rpc::Call call) {
    if (const auto known = rpc::only(call.params, {"model", "models", "all", "deadline_ms", "again"}); !known)
        return call.answer(known.error());
    const auto models = selected_models(call.params, fleet);
    if (!models) return call.answer(models.error());
    const auto deadline = selected_deadline(call.params);
    if (!deadline) return call.answer(deadline.error());
    // A load that is asked for once more shares the one under way: `again` changes nothing.
    if (const auto again = rpc::optional_flag(call.params, "again"); !again) return call.answer(again.error());
    fleet.load(
        *models, *deadline,
        [answer = std::move(call.answer)](Result<std::vector<LoadedReplica>> loaded) {
            if (!loaded) return answer(loaded.error());
            answer(rpc::Answer{{{"models", to_json(*loaded)}}, {}});
        },
        call.client_left.get());
}

void pin(Fleet& fleet, const rpc::Call& call) {
    if (const auto known = rpc::only(call.params, {"model", "pin"}); !known) return call.answer(known.error());
    const auto name = rpc::required_string(call.params, "model");
    if (!name) return call.answer(name.error());
    const auto model = fleet.find(*name);
    if (!model) return call.answer(model.error());
    const auto pinned = rpc::optional_flag(call.params, "pin");
    if (!pinned) return call.answer(pinned.error());
    if (const auto planned = require_plan(fleet, *name); !planned) return call.answer(planned.error());
    const bool shall = !call.params.contains("pin") || *pinned;
    fleet.admission().pin(*name, shall);
    call.answer(rpc::Answer{{{"model", *name}, {"pin", shall}}, {}});
}

void unload(Fleet& fleet, rpc::Call call) {
    if (const auto known = rpc::only(call.params, {"model", "models", "all", "again"}); !known)
        return call.answer(known.error());
    const auto models = selected_models(call.params, fleet);
    if (!models) return call.answer(models.error());
    const auto again = rpc::optional_flag(call.params, "again");
    if (!again) return call.answer(again.error());
    fleet.unload(
        *models,
        [answer = std::move(call.answer)](Result<std::vector<Receipt>> receipts) {
            if (!receipts) return answer(receipts.error());
            answer(rpc::Answer{{{"receipts", to_json(*receipts)}}, {}});
        },
        *again);
}

void restart(Fleet& fleet, rpc::Call call) {
    if (const auto known = rpc::only(call.params, {"model", "models", "all"}); !known)
        return call.answer(known.error());
    const auto models = selected_models(call.params, fleet);
    if (!models) return call.answer(models.error());
    fleet.restart(*models, [answer = std::move(call.answer)](Result<Fleet::Restarted> restarted) {
        if (!restarted) return answer(restarted.error());
        answer(rpc::Answer{{{"models", to_json(restarted->loaded)}, {"receipts", to_json(restarted->receipts)}}, {}});
    });
}

/// Whoever asks why asks about trouble: the first replica that does not serve speaks for the model.
const Replica& spokesman(const Model& model) {
    const auto troubled = std::find_if(model.replicas.begin(), model.replicas.end(),
                                       [](const auto& replica) { return !is_serving(replica->state()); });
    return troubled == model.replicas.end() ? *model.replicas.front() : **troubled;
}

std::string sentence_of(const std::string& memory, const Replica& speaks) {
    return memory.empty() ? speaks.sentence() : fmt::format("{} Memory: {}.", speaks.sentence(), memory);
}

rpc::Answer why_of(const Fleet& fleet, const std::string& name, const Model& model) {
    json::array replicas;
    for (const auto& replica : model.replicas) replicas.push_back(replica->why());
    const Replica& speaks = spokesman(model);
    return {{{"model", name},
             {"state", to_string(speaks.state())},
             {"sentence", sentence_of(fleet.admission().why(name), speaks)},
             {"memory", fleet.admission().footprint(name)},
             {"replicas", std::move(replicas)},
             {"graphs", speaks.graphs()},
             {"generate", speaks.generate()}},
            {}};
}

void why(Fleet& fleet, const rpc::Call& call) {
    if (const auto known = rpc::only(call.params, {"model"}); !known) return call.answer(known.error());
    const auto name = rpc::required_string(call.params, "model");
    if (!name) return call.answer(name.error());
    const auto model = fleet.find(*name);
    if (!model) return call.answer(model.error());
    const bool works = std::ranges::any_of((*model)->replicas, [](const auto& replica) {
        return replica->state() == WorkerState::busy || !replica->generate().is_null();
    });
    if (!works) return call.answer(why_of(fleet, *name, **model));
    // Counts that change with each request or token are asked for first, as `fleet.status` does.
    fleet.status([&fleet, name = *name, answer = call.answer](const json::array&) {
        const auto still = fleet.find(name);
        if (!still) return answer(still.error());
        answer(why_of(fleet, name, **still));
    });
}

}  // namespace

void add_model_methods(rpc::MethodTable& methods, Fleet& fleet) {
    methods["model.load"] = [&fleet](rpc::Call call) { load(fleet, std::move(call)); };
    methods["model.unload"] = [&fleet](rpc::Call call) { unload(fleet, std::move(call)); };
    methods["model.restart"] = [&fleet](rpc::Call call) { restart(fleet, std::move(call)); };
    methods["model.pin"] = [&fleet](const rpc::Call& call) { pin(fleet, call); };
    methods["model.why"] = [&fleet](const rpc::Call& call) { why(fleet, call); };
}

}  // namespace bulkhead::supervisor

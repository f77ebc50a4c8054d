#include <algorithm>

#include <fmt/format.h>

#include "ipc/base/text.h"
#include "supervisor/control/methods.h"

namespace bulkhead::supervisor {
namespace {

/// The limit in the channel's hello.
constexpr std::size_t client_name_bytes_max = 47;

void load(Fleet& fleet, rpc::Call call) {
    const Fleet::Models models = selected_models(call.params, fleet);
    const auto deadline = selected_deadline(call.params);
    // A repeated load shares the one under way: `again` changes nothing.
    (void)rpc::flag(call.params, "again");
    auto answer = rpc::answer_of<std::vector<LoadedReplica>>(
        call, [](const auto& loaded) { return json::object{{"models", to_json(loaded)}}; });
    fleet.load(models, deadline, std::move(answer), call.client_left.get(), call.peer.connection);
}

void pin(Fleet& fleet, const rpc::Call& call) {
    const std::string& name = selected_model(call.params, fleet).spec.name;
    const bool shall = rpc::flag(call.params, "pin", true);
    require_plan(fleet, name);
    fleet.admission().pin(name, shall);
    call.answer(json::object{{"model", name}, {"pin", shall}});
}

void unload(Fleet& fleet, rpc::Call call) {
    const Fleet::Models models = selected_models(call.params, fleet);
    const bool again = rpc::flag(call.params, "again");
    auto answer = rpc::answer_of<std::vector<Receipt>>(
        call, [](const auto& receipts) { return json::object{{"receipts", to_json(receipts)}}; });
    fleet.unload(models, std::move(answer), again);
}

void restart(Fleet& fleet, rpc::Call call) {
    const Fleet::Models models = selected_models(call.params, fleet);
    auto answer = rpc::answer_of<Fleet::Restarted>(call, [](const Fleet::Restarted& restarted) {
        return json::object{{"models", to_json(restarted.loaded)}, {"receipts", to_json(restarted.receipts)}};
    });
    fleet.restart(models, std::move(answer), call.peer.connection);
}

/// `why` is asked about trouble: the first replica that does not serve speaks for the model.
const Replica& spokesman(const Model& model) {
    const auto troubled =
        std::ranges::find_if(model.replicas, [](const auto& replica) { return !is_serving(replica->state()); });
    return troubled == model.replicas.end() ? *model.replicas.front() : **troubled;
}

std::string sentence_of(const std::string& memory, const Replica& speaks) {
    return memory.empty() ? speaks.sentence() : fmt::format("{} Memory: {}.", speaks.sentence(), memory);
}

json::object why_of(const Fleet& fleet, const Model& model) {
    const std::string& name = model.spec.name;
    json::array replicas;
    for (const auto& replica : model.replicas) replicas.push_back(replica->why());
    const Replica& speaks = spokesman(model);
    return {{"model", name},
            {"state", to_string(speaks.state())},
            {"sentence", sentence_of(fleet.admission().why(name), speaks)},
            {"memory", fleet.admission().footprint(speaks)},
            {"replicas", std::move(replicas)},
            {"graphs", speaks.graphs()},
            {"generate", speaks.generate()}};
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

void open(Fleet& fleet, rpc::Call call) {
    const std::string client = rpc::required_string(call.params, "client");
    if (client.empty() || client.size() > client_name_bytes_max || !is_printable(client))
        throw ErrorException{{ErrorCode::input_invalid, fmt::format("parameter \"client\" has {} bytes", client.size()),
                              fmt::format("give a printable name of 1 to {} bytes", client_name_bytes_max)}};
    const auto deadline = selected_deadline(call.params);
    Model& model = selected_model(call.params, fleet);
    const bool stateful = model.spec.state != config::StateScope::none;
    auto answer = rpc::answer_of<OpenedChannel>(call, [stateful](OpenedChannel opened) {
        rpc::Answer told{{{"fds", 1},
                          {"channel", opened.id},
                          {"model", opened.worker.model},
                          {"replica", opened.worker.replica},
                          {"generation", opened.worker.generation},
                          {"pid", opened.pid},
                          {"stateful", stateful}}};
        told.fd = std::move(opened.client_end);
        return told;
    });
    fleet.open_channel(model, {client, call.peer.pid, call.peer.uid, call.peer.connection}, deadline, std::move(answer),
                       call.client_left.get());
}

}  // namespace

void add_model_methods(rpc::MethodTable& methods, Fleet& fleet) {
    rpc::add(methods, "model.load", {"model", "models", "all", "deadline_ms", "again"}, fleet, load);
    rpc::add(methods, "model.unload", {"model", "models", "all", "again"}, fleet, unload);
    rpc::add(methods, "model.restart", {"model", "models", "all"}, fleet, restart);
    rpc::add(methods, "model.pin", {"model", "pin"}, fleet, pin);
    rpc::add(methods, "model.why", {"model"}, fleet, why);
    rpc::add(methods, "channel.open", {"model", "client", "deadline_ms"}, fleet, open);
}

}  // namespace bulkhead::supervisor

#include "supervisor/control/methods.h"

namespace bulkhead::supervisor {
namespace {

void subscribe(Fleet& fleet, const rpc::Call& call) {
    std::set<std::string> models;
    for (const auto& name : rpc::optional_strings(call.params, "models").value_or(std::vector<std::string>{}))
        models.insert(fleet.find(name).value()->spec.name);
    const auto sink = call.sink.lock();
    if (!sink) return;
    sink->subscribed();
    call.answer(rpc::Answer{{{"subscribed", true}}, {}});  // before the first event
    fleet.context().events.subscribe(sink, std::move(models));
}

}  // namespace

void add_event_methods(rpc::MethodTable& methods, Fleet& fleet) {
    methods["events.subscribe"] = rpc::method({"models"}, [&fleet](const rpc::Call& call) { subscribe(fleet, call); });
}

}  // namespace bulkhead::supervisor

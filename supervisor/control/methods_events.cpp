#include "supervisor/control/methods.h"

namespace bulkhead::supervisor {
namespace {

void subscribe(Fleet& fleet, const rpc::Call& call) {
    if (const auto known = rpc::only(call.params, {"models"}); !known) return call.answer(known.error());
    const auto names = rpc::optional_strings(call.params, "models");
    if (!names) return call.answer(names.error());
    std::set<std::string> models;
    if (*names) {
        for (const auto& name : **names) {
            if (const auto model = fleet.find(name); !model) return call.answer(model.error());
            models.insert(name);
        }
    }
    const auto sink = call.sink.lock();
    if (!sink) return;
    sink->subscribed();
    call.answer(rpc::Answer{{{"subscribed", true}}, {}});  // before the first event
    fleet.context().events.subscribe(sink, std::move(models));
}

}  // namespace

void add_event_methods(rpc::MethodTable& methods, Fleet& fleet) {
    methods["events.subscribe"] = [&fleet](const rpc::Call& call) { subscribe(fleet, call); };
}

}  // namespace bulkhead::supervisor

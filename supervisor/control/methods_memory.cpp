#include <fmt/format.h>

#include "supervisor/control/methods.h"

namespace bulkhead::supervisor {
namespace {

constexpr std::uint64_t bytes_max = std::uint64_t{1} << 40;

void plan(const Fleet& fleet, const rpc::Call& call) {
    if (const auto known = rpc::only(call.params, {"model"}); !known) return call.answer(known.error());
    const auto name = rpc::required_string(call.params, "model");
    if (!name) return call.answer(name.error());
    if (const auto model = fleet.find(*name); !model) return call.answer(model.error());
    if (const auto planned = require_plan(fleet, *name); !planned) return call.answer(planned.error());
    call.answer(rpc::Answer{fleet.admission().plan(*name), {}});
}

void reclaim(Fleet& fleet, const rpc::Call& call) {
    if (const auto known = rpc::only(call.params, {"device", "bytes", "client", "deadline_ms"}); !known)
        return call.answer(known.error());
    const auto device = rpc::required_string(call.params, "device");
    if (!device) return call.answer(device.error());
    const auto client = rpc::required_string(call.params, "client");
    if (!client) return call.answer(client.error());
    const auto bytes = rpc::optional_count(call.params, "bytes", bytes_max);
    if (!bytes) return call.answer(bytes.error());
    if (!*bytes)
        return call.answer(
            Error{ErrorCode::input_invalid, "parameter \"bytes\" is missing", "say how much room is needed"});
    const auto deadline = selected_deadline(call.params);
    if (!deadline) return call.answer(deadline.error());
    fleet.admission().make_room(
        *device, **bytes, *client, *deadline, [answer = call.answer](const Result<Admission::MadeRoom>& made) {
            if (!made) return answer(made.error());
            answer(rpc::Answer{
                {{"freed", made->freed}, {"receipts", to_json(made->receipts)}, {"short_of", made->short_of}}, {}});
        });
}

void ledger(const Fleet& fleet, const rpc::Call& call) {
    if (const auto known = rpc::only(call.params, {}); !known) return call.answer(known.error());
    call.answer(rpc::Answer{{{"devices", fleet.admission().ledger()}}, {}});
}

}  // namespace

void add_memory_methods(rpc::MethodTable& methods, Fleet& fleet) {
    methods["fleet.plan"] = [&fleet](const rpc::Call& call) { plan(fleet, call); };
    methods["fleet.reclaim"] = [&fleet](const rpc::Call& call) { reclaim(fleet, call); };
    methods["fleet.memory"] = [&fleet](const rpc::Call& call) { ledger(fleet, call); };
}

}  // namespace bulkhead::supervisor

#include <fmt/format.h>

#include "supervisor/control/methods.h"

namespace bulkhead::supervisor {
namespace {

constexpr std::uint64_t bytes_max = std::uint64_t{1} << 40;

void plan(const Fleet& fleet, const rpc::Call& call) {
    const std::string& name = selected_model(call.params, fleet).spec.name;
    require_plan(fleet, name);
    call.answer(rpc::Answer{fleet.admission().plan(name), {}});
}

void reclaim(Fleet& fleet, const rpc::Call& call) {
    const std::string device = rpc::required_string(call.params, "device");
    const std::string client = rpc::required_string(call.params, "client");
    const auto bytes = rpc::optional_count(call.params, "bytes", bytes_max);
    if (!bytes)
        throw ErrorException{
            {ErrorCode::input_invalid, "parameter \"bytes\" is missing", "say how much room is needed"}};
    const auto deadline = selected_deadline(call.params);
    const auto ticket = fleet.admission().make_room(
        device, *bytes, client, deadline, [answer = call.answer](const Result<Admission::MadeRoom>& made) {
            if (!made) return answer(made.error());
            answer(rpc::Answer{
                {{"freed", made->freed}, {"receipts", to_json(made->receipts)}, {"short_of", made->short_of}}, {}});
        });
    *call.client_left = [&fleet, ticket] { fleet.admission().leave(ticket); };
}

void ledger(const Fleet& fleet, const rpc::Call& call) {
    call.answer(rpc::Answer{{{"devices", fleet.admission().ledger()}}, {}});
}

}  // namespace

void add_memory_methods(rpc::MethodTable& methods, Fleet& fleet) {
    methods["fleet.plan"] = rpc::method({"model"}, [&fleet](const rpc::Call& call) { plan(fleet, call); });
    methods["fleet.reclaim"] = rpc::method({"device", "bytes", "client", "deadline_ms"},
                                           [&fleet](const rpc::Call& call) { reclaim(fleet, call); });
    methods["fleet.memory"] = rpc::method({}, [&fleet](const rpc::Call& call) { ledger(fleet, call); });
}

}  // namespace bulkhead::supervisor

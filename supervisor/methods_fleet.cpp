#include "supervisor/methods.h"

namespace bulkhead::supervisor {

void add_fleet_methods(rpc::MethodTable& methods, Fleet& fleet) {
    methods["fleet.status"] = [&fleet](rpc::Call call) {
        if (const auto known = rpc::only(call.params, {}); !known) return call.answer(known.error());
        fleet.status([answer = std::move(call.answer)](json::array rows) {
            answer(rpc::Answer{{{"models", std::move(rows)}}, {}});
        });
    };
}

}  // namespace bulkhead::supervisor

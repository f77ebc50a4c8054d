#include "supervisor/json_members.h"
#include "supervisor/methods.h"

namespace bulkhead::supervisor {
namespace {

json::object to_json(const Gpu& gpu) {
    json::array processes;
    for (const GpuProcess& process : gpu.processes)
        processes.push_back(json::object{{"pid", process.pid}, {"bytes", or_null(process.bytes)}});
    return {{"index", gpu.index},
            {"uuid", gpu.uuid},
            {"name", gpu.name},
            {"total_bytes", gpu.total_bytes},
            {"free_bytes", gpu.free_bytes},
            {"processes", std::move(processes)}};
}

void status(Fleet& fleet, rpc::Call call) {
    if (const auto known = rpc::only(call.params, {}); !known) return call.answer(known.error());
    read_gpus(fleet.context(), [answer = std::move(call.answer)](Result<std::vector<Gpu>> gpus) {
        if (!gpus && gpus.error().code != ErrorCode::not_running) return answer(gpus.error());
        json::object result{{"nvml", gpus.has_value()}};
        if (!gpus) result["reason"] = gpus.error().attempt;
        json::array list;
        if (gpus)
            for (const Gpu& gpu : *gpus) list.push_back(to_json(gpu));
        result["gpus"] = std::move(list);
        answer(rpc::Answer{std::move(result), {}});
    });
}

}  // namespace

void add_gpu_methods(rpc::MethodTable& methods, Fleet& fleet) {
    methods["gpu.status"] = [&fleet](rpc::Call call) { status(fleet, std::move(call)); };
}

}  // namespace bulkhead::supervisor

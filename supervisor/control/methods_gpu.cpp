#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include "supervisor/base/json_members.h"
#include "supervisor/base/text.h"
#include "supervisor/control/methods.h"

namespace bulkhead::supervisor {
namespace {

json::object to_json(const Gpu& gpu, const std::optional<std::string>& quarantined) {
    json::array processes;
    for (const GpuProcess& process : gpu.processes)
        processes.push_back(json::object{{"pid", process.pid}, {"bytes", or_null(process.bytes)}});
    const GpuSensors& sensors = gpu.sensors;
    json::array throttled;
    for (const std::string_view reason : sensors.throttled) throttled.emplace_back(reason);
    const json::value power = sensors.power_mw ? json::value(*sensors.power_mw / 1000.0) : json::value(nullptr);
    return {{"index", gpu.index},
            {"uuid", gpu.uuid},
            {"name", gpu.name},
            {"state", gpu.trouble.empty() ? "ok" : gpu.trouble},
            {"quarantined", or_null(quarantined)},
            {"total_bytes", or_null(gpu.total_bytes)},
            {"free_bytes", or_null(gpu.free_bytes)},
            {"clock_mhz", or_null(sensors.clock_mhz)},
            {"power_w", power},
            {"temperature_c", or_null(sensors.temperature_c)},
            {"utilization_percent", or_null(sensors.utilization_percent)},
            {"throttled", std::move(throttled)},
            {"processes", gpu.processes_known ? json::value(std::move(processes)) : json::value(nullptr)}};
}

void gpu_status(Fleet& fleet, rpc::Call call) {
    read_gpus(fleet.context(), [&fleet, answer = std::move(call.answer)](Result<std::vector<Gpu>> gpus) {
        if (!gpus && gpus.error().code == ErrorCode::queue_full) return answer(gpus.error());
        json::object result{{"nvml", gpus.has_value()}};
        if (!gpus) result["reason"] = gpus.error().attempt;
        json::array list;
        if (gpus)
            for (const Gpu& gpu : *gpus) list.push_back(to_json(gpu, fleet.context().gpu_quarantine.reason(gpu.uuid)));
        result["gpus"] = std::move(list);
        answer(std::move(result));
    });
}

/// Works even if NVML does not answer or no longer sees the GPU.
void lift(Fleet& fleet, rpc::Call call) {
    const std::string uuid = rpc::required_string(call.params, "uuid");
    FleetContext& context = fleet.context();
    if (const auto reason = context.gpu_quarantine.reason(uuid)) {
        context.gpu_quarantine.lift(uuid);
        spdlog::info("gpu={} quarantine lifted by a person; it was: {}", uuid, escaped(*reason));
        return call.answer(json::object{{"uuid", uuid}, {"was", *reason}});
    }
    read_gpus(context, [uuid, answer = std::move(call.answer)](const Result<std::vector<Gpu>>& gpus) {
        const std::string attempt = fmt::format("lifting the quarantine of GPU {}", in_quotes(uuid));
        std::string known;
        if (gpus) {
            for (const Gpu& gpu : *gpus) {
                if (gpu.uuid == uuid)
                    return answer(Error{ErrorCode::input_invalid, attempt + ": it is not quarantined", {}});
                known += (known.empty() ? "" : ", ") + gpu.uuid;
            }
        }
        answer(Error{ErrorCode::input_invalid, attempt + ": there is no such GPU",
                     known.empty() ? "`bulkhead gpus` names those there are" : "there is " + known});
    });
}

}  // namespace

void add_gpu_methods(rpc::MethodTable& methods, Fleet& fleet) {
    rpc::add(methods, "gpu.status", {}, fleet, gpu_status);
    rpc::add(methods, "gpu.lift", {"uuid"}, fleet, lift);
}

}  // namespace bulkhead::supervisor

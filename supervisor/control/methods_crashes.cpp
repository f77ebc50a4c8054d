#include "supervisor/base/limits.h"
#include "supervisor/control/methods.h"

namespace bulkhead::supervisor {
namespace {

json::value to_json(const CrashReports::Lost& lost) {
    if (lost.count == 0) return nullptr;
    return json::object{{"count", lost.count}, {"time", lost.time_ms}, {"reason", lost.reason}};
}

/// Accepts any name: a model that has left the fleet file may still have reports.
void list(Fleet& fleet, const rpc::Call& call) {
    const std::string model = call.params.contains("model") ? rpc::required_string(call.params, "model") : "";
    const auto max = rpc::optional_count(call.params, "limit", limits::crash_reports_max);
    FleetContext& context = fleet.context();
    if (context.off_loop.waiting() >= limits::off_loop_requests_max)
        return call.answer(
            Error{ErrorCode::queue_full, "reading the crash reports: too many wait for that", "ask again later"});
    context.off_loop.run(
        "reading the crash reports",
        [reports = context.crash_reports, model, max = max.value_or(limits::crash_list_default)] {
            return reports->list(model, max);
        },
        [answer = call.answer, reports = context.crash_reports](Result<json::array> crashes) {
            if (!crashes) return answer(crashes.error());
            answer(rpc::Answer{{{"crashes", std::move(*crashes)}, {"lost", to_json(reports->lost())}}, {}});
        });
}

}  // namespace

void add_crash_methods(rpc::MethodTable& methods, Fleet& fleet) {
    methods["crashes.list"] = rpc::method({"model", "limit"}, [&fleet](const rpc::Call& call) { list(fleet, call); });
}

}  // namespace bulkhead::supervisor

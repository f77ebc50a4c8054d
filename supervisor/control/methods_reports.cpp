#include "supervisor/base/limits.h"
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
    call.answer(json::object{{"subscribed", true}});  // before the first event
    fleet.context().events.subscribe(sink, std::move(models));
}

void tail(Fleet& fleet, const rpc::Call& call) {
    const auto lines = rpc::optional_count(call.params, "lines", limits::log_lines_kept);
    const bool follow = rpc::flag(call.params, "follow");
    ModelLog& log = selected_model(call.params, fleet).log;
    const auto sink = call.sink.lock();
    if (follow && sink) sink->subscribed();
    call.answer(json::object{{"lines", log.tail(lines.value_or(limits::log_tail_default))}});
    if (follow && sink) log.follow(sink);
}

json::value to_json(const CrashReports::Lost& lost) {
    if (lost.count == 0) return nullptr;
    return json::object{{"count", lost.count}, {"time", lost.time_ms}, {"reason", lost.reason}};
}

/// Accepts any name: a model that has left the fleet file may still have reports.
void list(Fleet& fleet, rpc::Call call) {
    const std::string model = call.params.contains("model") ? rpc::required_string(call.params, "model") : "";
    const auto max = rpc::optional_count(call.params, "limit", limits::crash_reports_max);
    FleetContext& context = fleet.context();
    context.blocking.run_for_client(
        "reading the crash reports",
        [reports = context.crash_reports, model, max = max.value_or(limits::crash_list_default)] {
            return reports->list(model, max);
        },
        rpc::answer_of<json::array>(call, [reports = context.crash_reports](json::array crashes) {
            return json::object{{"crashes", std::move(crashes)}, {"lost", to_json(reports->lost())}};
        }));
}

}  // namespace

void add_report_methods(rpc::MethodTable& methods, Fleet& fleet) {
    rpc::add(methods, "events.subscribe", {"models"}, fleet, subscribe);
    rpc::add(methods, "logs.tail", {"model", "lines", "follow"}, fleet, tail);
    rpc::add(methods, "crashes.list", {"model", "limit"}, fleet, list);
}

}  // namespace bulkhead::supervisor

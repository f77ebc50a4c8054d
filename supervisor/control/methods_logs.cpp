#include "supervisor/base/limits.h"
#include "supervisor/control/methods.h"

namespace bulkhead::supervisor {
namespace {

void tail(Fleet& fleet, const rpc::Call& call) {
    const auto lines = rpc::optional_count(call.params, "lines", limits::log_lines_kept);
    const bool follow = rpc::flag(call.params, "follow");
    ModelLog& log = selected_model(call.params, fleet).log;
    const auto sink = call.sink.lock();
    if (follow && sink) sink->subscribed();
    call.answer(rpc::Answer{{{"lines", log.tail(lines.value_or(limits::log_tail_default))}}, {}});
    if (follow && sink) log.follow(sink);
}

}  // namespace

void add_log_methods(rpc::MethodTable& methods, Fleet& fleet) {
    methods["logs.tail"] =
        rpc::method({"model", "lines", "follow"}, [&fleet](const rpc::Call& call) { tail(fleet, call); });
}

}  // namespace bulkhead::supervisor

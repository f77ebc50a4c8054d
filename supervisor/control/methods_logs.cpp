#include "supervisor/base/limits.h"
#include "supervisor/control/methods.h"

namespace bulkhead::supervisor {
namespace {

void tail(Fleet& fleet, const rpc::Call& call) {
    if (const auto known = rpc::only(call.params, {"model", "lines", "follow"}); !known)
        return call.answer(known.error());
    const auto name = rpc::required_string(call.params, "model");
    if (!name) return call.answer(name.error());
    const auto lines = rpc::optional_count(call.params, "lines", limits::log_lines_kept);
    if (!lines) return call.answer(lines.error());
    const auto follow = rpc::optional_flag(call.params, "follow");
    if (!follow) return call.answer(follow.error());
    const auto model = fleet.find(*name);
    if (!model) return call.answer(model.error());
    const auto sink = call.sink.lock();
    if (*follow && sink) sink->subscribed();
    ModelLog& log = (*model)->log;
    call.answer(rpc::Answer{{{"lines", log.tail(lines->value_or(limits::log_tail_default))}}, {}});
    if (*follow && sink) log.follow(sink);
}

}  // namespace

void add_log_methods(rpc::MethodTable& methods, Fleet& fleet) {
    methods["logs.tail"] = [&fleet](const rpc::Call& call) { tail(fleet, call); };
}

}  // namespace bulkhead::supervisor

#include "supervisor/base/notifications.h"

#include <algorithm>

namespace bulkhead::supervisor {

bool Subscribers::empty() {
    std::erase_if(sinks_, [](const auto& sink) { return sink.expired(); });
    return sinks_.empty();
}

bool Subscribers::contains(const std::weak_ptr<NotificationSink>& sink) const {
    return std::any_of(sinks_.begin(), sinks_.end(),
                       [&](const auto& one) { return !one.owner_before(sink) && !sink.owner_before(one); });
}

void Subscribers::notify(std::string_view method, json::object params) {
    const std::string line =
        json::serialize(json::object{{"jsonrpc", "2.0"}, {"method", method}, {"params", std::move(params)}}) + "\n";
    // A failing sink may remove itself during the call.
    const auto told = sinks_;
    for (const auto& weak : told)
        if (const auto sink = weak.lock()) sink->notify(line);
}

}  // namespace bulkhead::supervisor

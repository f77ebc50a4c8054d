#include "clients/cpp/control/event_queue.h"

#include <utility>

#include "clients/cpp/base/limits.h"
#include "clients/cpp/base/wait_ready.h"

namespace bulkhead {

namespace json = boost::json;

json::object subscription(const std::vector<std::string>& models) {
    json::object params;
    if (!models.empty()) params["models"] = json::value_from(models);
    return params;
}

void EventQueue::push(const json::object& event) {
    if (events_.size() == limits::events_max) lose();  // the reader is too slow
    if (dropping_) return;
    if (!gap_at_) known_until_ = unix_ms();
    events_.push_back(event);
}

void EventQueue::lose() {
    dropping_ = true;
    if (!gap_at_) gap_at_ = events_.size();
}

void EventQueue::resume(const json::value& status) {
    const std::int64_t now = unix_ms();
    if (gap_at_) {
        const json::value* rows = status.is_object() ? status.get_object().if_contains("models") : nullptr;
        events_.insert(events_.begin() + static_cast<std::ptrdiff_t>(*gap_at_),
                       {{"event", "gap"},
                        {"time", now},
                        {"since", known_until_},
                        {"models", rows != nullptr ? *rows : json::value(json::array{})}});
        gap_at_.reset();
    }
    known_until_ = now;
}

std::optional<json::object> EventQueue::pop() {
    if (events_.empty() || gap_at_ == 0u) return std::nullopt;
    json::object first = std::move(events_.front());
    events_.pop_front();
    if (gap_at_) --*gap_at_;
    return first;
}

}  // namespace bulkhead

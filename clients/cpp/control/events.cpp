#include "bulkhead/events.h"

#include <algorithm>
#include <utility>

#include "clients/cpp/base/wait_ready.h"
#include "clients/cpp/control/event_queue.h"

namespace bulkhead {

namespace json = boost::json;
using std::chrono::milliseconds;

EventStream::EventStream(ControlClient control, std::vector<std::string> models)
    : control_{std::make_unique<ControlClient>(std::move(control))}, queue_{std::make_unique<EventQueue>()},
      models_{std::move(models)} {
    control_->on_notification([queue = queue_.get()](std::string_view method, const json::object& params) {
        if (method == "event") queue->push(params);
    });
}

EventStream::EventStream(EventStream&&) noexcept = default;
EventStream& EventStream::operator=(EventStream&&) noexcept = default;
EventStream::~EventStream() = default;

Result<EventStream> EventStream::open(const std::filesystem::path& socket, std::vector<std::string> models) {
    Result<ControlClient> control = ControlClient::connect(socket);
    if (!control) return std::move(control).error();
    EventStream stream{std::move(*control), std::move(models)};
    if (const Result<> subscribed = stream.resume({}); !subscribed) return subscribed.error();
    return stream;
}

/// Subscribes if needed, and asks for the fleet's state if events were lost. A subscription belongs
/// to its connection: if that ends between the two calls, both are repeated.
Result<> EventStream::resume(std::optional<milliseconds> deadline) {
    control_->on_reconnect([this] { subscribed_ = false; });
    const Result<> done = [&]() -> Result<> {
        for (;;) {
            if (!subscribed_) {
                if (const auto asked = control_->call("events.subscribe", subscription(models_), deadline); !asked)
                    return asked.error();
                subscribed_ = true;
            }
            queue_->collect();
            json::value status;
            if (queue_->has_gap()) {
                Result<Answer> answer = control_->call("fleet.status", {}, deadline);
                if (!subscribed_) queue_->lose();
                if (!answer) return answer.error();
                if (!subscribed_) continue;
                status = std::move(answer->result);
            }
            queue_->resume(status);
            return {};
        }
    }();
    control_->on_reconnect({});
    return done;
}

Result<json::object> EventStream::next(std::optional<milliseconds> deadline) {
    std::optional<Clock::time_point> until;
    if (deadline) until = deadline_in(*deadline);
    const auto left = [&]() -> std::optional<milliseconds> {
        if (!until) return std::nullopt;
        return std::max(std::chrono::ceil<milliseconds>(*until - Clock::now()), milliseconds{0});
    };
    for (;;) {
        if (auto event = queue_->pop()) return std::move(*event);
        if (!subscribed_ || queue_->has_gap()) {
            if (const Result<> resumed = resume(left()); !resumed)
                return Error{resumed.error()}.during("resuming the events");
            continue;
        }
        const Result<> waited = control_->wait_notification(left());
        if (waited) continue;
        if (waited.error().code == ErrorCode::deadline_exceeded) return waited.error();
        subscribed_ = false;  // it ended with its connection
        queue_->lose();
    }
}

}  // namespace bulkhead

#include "clients/cli/top/feed.h"

#include <algorithm>
#include <array>

#include <fmt/format.h>

#include "clients/cli/text/json_access.h"
#include "clients/cli/text/limits.h"
#include "clients/cli/text/render.h"
#include "clients/cpp/control/control_rules.h"

namespace bulkhead::cli::top {
namespace {

using namespace std::chrono_literals;

constexpr auto reconnect_pause = 500ms;
constexpr auto late = 3s;        ///< an answer that takes longer is reported
constexpr auto given_up = 15s;   ///< after this the connection counts as dead
constexpr std::size_t orders_max = 16;
constexpr std::size_t events_max = 256;  ///< between two frames; older ones are dropped

std::string text_of(const Error& error) {
    return one_line(error.remedy.empty() ? error.attempt : fmt::format("{}; {}", error.attempt, error.remedy));
}

/// "voice-1: ready in 1.2 s", "voice-1: 251.0 MiB back in 12 ms, verified"
Outcome outcome_of(const Order& order, const json::value& result) {
    if (order.method == "model.pin")
        return {fmt::format("{}: {}", order.model, bool_member(result, "pin") ? "pinned" : "no longer pinned")};
    std::string text;
    bool verified = true;
    for (const json::value& receipt : array_member(result, "receipts")) {
        const auto bytes = integer_member(receipt, "gpu_bytes").value_or(integer_member(receipt, "host_bytes").value_or(0));
        verified = verified && bool_member(receipt, "verified");
        text += fmt::format("; {} back in {}, {}", bytes_text(static_cast<std::uint64_t>(std::max<std::int64_t>(bytes, 0))),
                            ms_text(number_member(receipt, "ms").value_or(0)),
                            bool_member(receipt, "verified") ? "verified" : "not verified");
    }
    for (const json::value& loaded : array_member(result, "models"))
        text += fmt::format("; ready in {}", ms_text(number_member(loaded, "ms").value_or(0)));
    if (text.empty()) text = "; it had no process";
    return {fmt::format("{}: {}", order.model, text.substr(2)), !verified};
}

}  // namespace

Feed::Clock::time_point Feed::due() const {
    if (!connection_ || !asked_at_) return next_;
    return *asked_at_ + given_up;
}

std::string Feed::trouble(Clock::time_point now) const {
    const auto seconds = [&](Clock::time_point since) {
        return std::chrono::duration_cast<std::chrono::seconds>(now - since).count();
    };
    if (!connection_ && !why_not_.empty())
        return fmt::format("no daemon{}, trying again: {}",
                           answered_at_ ? fmt::format(" for {} s", seconds(*answered_at_)) : "", why_not_);
    if (asked_at_ && now - *asked_at_ >= late)
        return fmt::format("no answer for {} s; the figures below are as old", seconds(*asked_at_));
    return {};
}

void Feed::work(Clock::time_point now) {
    if (connection_) receive(now);
    if (connection_ && asked_at_ && now - *asked_at_ >= given_up) disconnect(now, "it does not answer");
    if (!connection_ && now >= next_) connect(now);
    if (connection_ && !asked_at_ && now >= next_) ask(now);
    if (connection_) flush(now);
}

void Feed::connect(Clock::time_point now) {
    Result<ControlConnection> connection = ControlConnection::connect(socket_, false);
    next_ = now + reconnect_pause;
    if (!connection) {
        why_not_ = one_line(connection.error().attempt);
        return;
    }
    connection_.emplace(std::move(*connection));
    next_ = now;
    send("events.subscribe", {});
}

void Feed::disconnect(Clock::time_point now, std::string why) {
    connection_.reset();
    unsent_.clear();
    questions_.clear();
    asked_at_.reset();
    why_not_ = std::move(why);
    next_ = now;
    for (const auto& [id, order] : std::exchange(orders_, {}))
        outcomes_.push_back({fmt::format("{}: the connection ended before the answer came", order.model), true});
}

std::int64_t Feed::send(std::string_view method, const json::object& params) {
    const std::int64_t id = ++last_id_;
    if (const Result<std::string> line = control::request_line(id, method, params)) unsent_ += *line;
    return id;
}

void Feed::ask(Clock::time_point now) {
    asked_ = {};
    asked_at_ = now;
    for (const char* method : {"fleet.status", "fleet.memory"}) questions_[send(method, {})] = method;
    if (has_gpus_) questions_[send("gpu.status", {})] = "gpu.status";  // without GPUs, this would wake the driver
}

Result<> Feed::carry_out(const Order& order) {
    if (!connection_) return Error{ErrorCode::not_running, order.method + ": no daemon answers", {}};
    if (orders_.size() >= orders_max)
        return Error{ErrorCode::queue_full, fmt::format("{}: {} others are under way", order.method, orders_.size()),
                     "wait for them"};
    orders_[send(order.method, order.params)] = order;
    return {};
}

void Feed::flush(Clock::time_point now) {
    while (!unsent_.empty()) {
        const Result<std::optional<std::size_t>> sent = connection_->send_some(unsent_);
        if (!sent || !*sent) return disconnect(now, "the connection ended");
        if (**sent == 0) return;
        unsent_.erase(0, **sent);
    }
}

void Feed::receive(Clock::time_point now) {
    Result<bool> open = connection_->receive_some();
    for (;;) {
        Result<std::optional<json::object>> message = connection_->next();
        if (!message) return disconnect(now, one_line(message.error().attempt));
        if (!*message) break;
        take(std::move(**message), now);
    }
    if (!open || !*open) disconnect(now, "the connection ended");
}

void Feed::take(json::object message, Clock::time_point now) {
    const json::value* id = message.if_contains("id");
    if (id == nullptr) {
        const json::value* params = message.if_contains("params");
        if (params != nullptr && params->is_object() && events_.size() < events_max)
            events_.push_back(params->get_object());
        return;
    }
    const std::int64_t number = id->is_int64() ? id->get_int64() : 0;
    json::object data;
    const json::value* error = message.if_contains("error");
    const json::value* found = message.if_contains("result");
    const json::value result = found != nullptr ? *found : json::value{};
    if (const auto order = orders_.find(number); order != orders_.end()) {
        outcomes_.push_back(error != nullptr
                                ? Outcome{text_of(control::error_from(*error, data)), true}
                                : outcome_of(order->second, result));
        orders_.erase(order);
        return;
    }
    const auto question = questions_.find(number);
    if (question == questions_.end()) return;
    if (question->second == "fleet.status") asked_.status = result;
    if (question->second == "fleet.memory") asked_.memory = result;
    if (question->second == "gpu.status") asked_.gpus = result;
    questions_.erase(question);
    if (!questions_.empty()) return;
    has_gpus_ = std::ranges::any_of(array_member(asked_.status, "models"), [](const json::value& row) {
        return text_member(row, "device").starts_with("cuda");
    });
    answers_ = std::move(asked_);
    next_ = std::max(*asked_at_ + limits::watch, now);
    asked_at_.reset();
    answered_at_ = now;
    why_not_.clear();
}

}  // namespace bulkhead::cli::top

#include "clients/cli/top/feed.h"

#include <algorithm>

#include <fmt/format.h>

#include "clients/cli/text/json_access.h"
#include "clients/cli/text/limits.h"
#include "clients/cli/text/render.h"

namespace bulkhead::cli::top {
namespace {

using namespace std::chrono_literals;

constexpr auto retry_pause = 500ms;
constexpr auto late = 3s;       ///< an answer that takes longer is reported
constexpr auto given_up = 15s;  ///< after this the daemon counts as away
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
        const auto bytes =
            integer_member(receipt, "gpu_bytes").value_or(integer_member(receipt, "host_bytes").value_or(0));
        verified = verified && bool_member(receipt, "verified");
        text +=
            fmt::format("; {} back in {}, {}", bytes_text(static_cast<std::uint64_t>(std::max<std::int64_t>(bytes, 0))),
                        ms_text(number_member(receipt, "ms").value_or(0)),
                        bool_member(receipt, "verified") ? "verified" : "not verified");
    }
    for (const json::value& loaded : array_member(result, "models"))
        text += fmt::format("; ready in {}", ms_text(number_member(loaded, "ms").value_or(0)));
    if (text.empty()) text = "; it had no process";
    return {fmt::format("{}: {}", order.model, text.substr(2)), !verified};
}

}  // namespace

Feed::Feed(boost::asio::io_context& loop, const std::filesystem::path& socket)
    : control_{loop.get_executor(), socket}, next_turn_{loop} {
    ask();
}

std::string Feed::trouble(Clock::time_point now) const {
    const auto seconds = [&](Clock::time_point since) {
        return std::chrono::duration_cast<std::chrono::seconds>(now - since).count();
    };
    if (failure_)
        return fmt::format("no daemon{}, trying again: {}",
                           answered_at_ ? fmt::format(" for {} s", seconds(*answered_at_)) : "",
                           one_line(failure_->attempt));
    if (unanswered_ > 0 && now - asked_at_ >= late)
        return fmt::format("no answer for {} s; the figures below are as old", seconds(asked_at_));
    return {};
}

void Feed::ask() {
    asked_at_ = Clock::now();
    listen();
    ask("fleet.status", &Sampler::Answers::status);
    ask("fleet.memory", &Sampler::Answers::memory);
    // Without GPUs, this would wake the driver.
    if (has_gpus_) ask("gpu.status", &Sampler::Answers::gpus);
}

void Feed::ask(const char* method, json::value Sampler::Answers::*place) {
    ++unanswered_;
    control_.async_call(method, {}, given_up, [this, place](Result<Answer> answer) {
        if (answer)
            asked_.*place = std::move(answer->result);
        else if (place != &Sampler::Answers::gpus)  // they stay null: models are shown without them
            refused_ = answer.error();
        if (--unanswered_ == 0) ask_again();
    });
}

/// Ends a turn, and sets the time of the next.
void Feed::ask_again() {
    const Clock::time_point now = Clock::now();
    failure_ = std::exchange(refused_, std::nullopt);
    if (failure_ && failure_->code == ErrorCode::deadline_exceeded)
        for (const auto& [number, order] : std::exchange(orders_, {}))
            outcomes_.push_back({order.model + ": the daemon does not answer; it may still do it", true});
    if (!failure_) {
        answered_at_ = now;
        answers_ = std::exchange(asked_, {});
        has_gpus_ = std::ranges::any_of(array_member(answers_->status, "models"), [](const json::value& row) {
            return text_member(row, "device").starts_with("cuda");
        });
    }
    next_turn_.expires_at(failure_ ? now + retry_pause : std::max(asked_at_ + limits::watch, now));
    next_turn_.async_wait([this](boost::system::error_code cancelled) {
        if (!cancelled) ask();
    });
}

void Feed::listen() {
    if (std::exchange(listens_, true)) return;
    control_.async_next_event({}, [this](Result<json::object> event) {
        listens_ = false;
        if (!event) return;  // the next turn listens again
        const json::value* kind = event->if_contains("event");
        if ((kind == nullptr || *kind != "gap") && events_.size() < events_max) events_.push_back(std::move(*event));
        listen();
    });
}

Result<> Feed::carry_out(const Order& order) {
    if (orders_.size() >= orders_max)
        return Error{ErrorCode::queue_full, fmt::format("{}: {} others are under way", order.method, orders_.size()),
                     "wait for them"};
    orders_.emplace(++last_order_, order);
    control_.async_call(order.method, order.params, [this, order, number = last_order_](Result<Answer> answer) {
        orders_.erase(number);
        outcomes_.push_back(answer ? outcome_of(order, answer->result) : Outcome{text_of(answer.error()), true});
    });
    return {};
}

}  // namespace bulkhead::cli::top

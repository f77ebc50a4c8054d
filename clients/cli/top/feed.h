#pragma once

#include <chrono>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <boost/asio/io_context.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/json.hpp>

#include "bulkhead/async_control.h"
#include "clients/cli/top/screen.h"
#include "clients/cli/top/snapshot.h"

namespace bulkhead::cli::top {

/// The outcome of an order, in one line.
struct Outcome {
    std::string text;
    bool is_bad = false;
};

/// Asks the daemon once a second, receives its events, and carries out orders, while its loop runs.
/// Waits for a daemon that goes away. The loop must not run after its end.
class Feed {
public:
    using Clock = std::chrono::steady_clock;
    Feed(boost::asio::io_context& loop, const std::filesystem::path& socket);

    /// Errors  queue_full: too many orders are under way
    [[nodiscard]] Result<> carry_out(const Order& order);

    /// Returns what arrived since the last call.
    [[nodiscard]] std::optional<Sampler::Answers> take_answers() { return std::exchange(answers_, std::nullopt); }
    [[nodiscard]] std::vector<boost::json::object> take_events() { return std::exchange(events_, {}); }
    [[nodiscard]] std::vector<Outcome> take_outcomes() { return std::exchange(outcomes_, {}); }
    /// Why the last questions had no answer.
    [[nodiscard]] const std::optional<Error>& failure() const { return failure_; }
    /// Why answers are missing; empty while they arrive.
    [[nodiscard]] std::string trouble(Clock::time_point now) const;

private:
    void ask();
    void ask(const char* method, boost::json::value Sampler::Answers::*place);
    void ask_again();
    void listen();

    AsyncControl control_;
    boost::asio::steady_timer next_turn_;
    Clock::time_point asked_at_{};
    int unanswered_ = 0;            ///< questions of this turn
    std::optional<Error> refused_;  ///< the error of one of them
    Sampler::Answers asked_;        ///< answers of this turn so far
    std::optional<Sampler::Answers> answers_;
    std::optional<Clock::time_point> answered_at_;
    std::optional<Error> failure_;
    std::vector<boost::json::object> events_;
    bool listens_ = false;
    std::vector<Outcome> outcomes_;
    std::map<std::uint64_t, Order> orders_;  ///< under way
    std::uint64_t last_order_ = 0;
    bool has_gpus_ = false;
};

}  // namespace bulkhead::cli::top

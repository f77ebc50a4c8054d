#pragma once

#include <chrono>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include <boost/json.hpp>

#include "clients/cli/top/screen.h"
#include "clients/cli/top/snapshot.h"
#include "clients/cpp/control/control_connection.h"

namespace bulkhead::cli::top {

/// The outcome of an order, in one line.
struct Outcome {
    std::string text;
    bool is_bad = false;
};

/// Asks the daemon once a second, receives its events, and carries out orders; reconnects if the
/// connection ends. Never blocks: its owner polls `fd` until `due`, then calls `work`.
class Feed {
public:
    using Clock = std::chrono::steady_clock;
    explicit Feed(std::filesystem::path socket) : socket_{std::move(socket)} {}

    [[nodiscard]] int fd() const { return connection_ ? connection_->fd() : -1; }
    [[nodiscard]] bool has_unsent() const { return !unsent_.empty(); }
    [[nodiscard]] Clock::time_point due() const;
    void work(Clock::time_point now);
    /// Errors  queue_full: too many orders are under way; not_running: no connection now
    [[nodiscard]] Result<> carry_out(const Order& order);

    /// Returns what arrived since the last call.
    [[nodiscard]] std::optional<Sampler::Answers> take_answers() { return std::exchange(answers_, std::nullopt); }
    [[nodiscard]] std::vector<boost::json::object> take_events() { return std::exchange(events_, {}); }
    [[nodiscard]] std::vector<Outcome> take_outcomes() { return std::exchange(outcomes_, {}); }
    /// Why answers are missing; empty while they arrive.
    [[nodiscard]] std::string trouble(Clock::time_point now) const;

private:
    void connect(Clock::time_point now);
    void disconnect(Clock::time_point now, std::string why);
    void ask(Clock::time_point now);
    std::int64_t send(std::string_view method, const boost::json::object& params);
    void flush(Clock::time_point now);
    void receive(Clock::time_point now);
    void take(boost::json::object message, Clock::time_point now);

    std::filesystem::path socket_;
    std::optional<ControlConnection> connection_;
    std::string unsent_;
    std::int64_t last_id_ = 0;
    std::map<std::int64_t, std::string> questions_;  ///< methods asked in this turn, by id
    std::map<std::int64_t, Order> orders_;
    Sampler::Answers asked_;  ///< answers of this turn so far
    std::optional<Sampler::Answers> answers_;
    std::vector<boost::json::object> events_;
    std::vector<Outcome> outcomes_;
    bool has_gpus_ = false;
    std::string why_not_;  ///< why there is no connection
    std::optional<Clock::time_point> answered_at_;
    std::optional<Clock::time_point> asked_at_;
    Clock::time_point next_{};  ///< time of the next question or connection attempt
};

}  // namespace bulkhead::cli::top

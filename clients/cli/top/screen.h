#pragma once

#include <deque>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <boost/json.hpp>

#include "clients/cli/top/keys.h"
#include "clients/cli/top/snapshot.h"

namespace bulkhead::cli::top {

/// What the rows are sorted by; `fleet` is the order of the fleet file.
enum class Sort : std::uint8_t { fleet, name, state, memory, requests, tokens, p99, queue, idle };
inline constexpr Sort sort_last = Sort::idle;
[[nodiscard]] std::string_view to_string(Sort sort);

/// A call of the control socket that a key asked for, and the person agreed to.
struct Order {
    std::string method;
    std::string model;
    boost::json::object params;
};

/// What a key asks for, beyond a change of the screen.
struct Effect {
    bool quit = false;
    std::optional<Order> order{};
};

/// Everything that a frame shows, and that keys change. Reads no clock and no terminal.
struct Screen {
    Snapshot snapshot;
    std::deque<std::string> events;  ///< the newest last, at most `events_max`
    std::string trouble;             ///< why the snapshot is old; empty: it is not
    std::string notice;              ///< how the last order went
    bool notice_is_bad = false;

    Sort sort = Sort::fleet;
    bool backwards = false;
    std::string filter;
    std::string chosen;         ///< title of a row; empty: the first
    std::size_t first_row = 0;  ///< of the table, that is shown
    enum class Mode : std::uint8_t { table, filter, question, help } mode = Mode::table;
    std::string question;
    std::optional<Order> asked;  ///< carried out if the question is answered with yes

    static constexpr std::size_t events_max = 32;

    /// A notification of the daemon; those that come with each request are left out.
    void add_event(const boost::json::object& event);
    /// How an order went.
    void tell(std::string text, bool is_bad);
    [[nodiscard]] Effect press(const Key& key);

    /// As the table shows them: filtered and sorted.
    [[nodiscard]] std::vector<const WorkerRow*> rows() const;
    /// Of these rows the one with the cursor; 0 when it is gone.
    [[nodiscard]] std::size_t chosen_row(const std::vector<const WorkerRow*>& rows) const;

private:
    void move(std::ptrdiff_t by);
    void ask(std::string_view verb, Order order);
    void press_in_table(const Key& key, Effect& effect);
    void press_in_filter(const Key& key);
};

}  // namespace bulkhead::cli::top

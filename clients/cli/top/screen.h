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

/// The sort order of the rows; `fleet` is the fleet file's order.
enum class Sort : std::uint8_t { fleet, name, state, memory, requests, tokens, p99, queue, idle };
inline constexpr Sort sort_last = Sort::idle;
[[nodiscard]] std::string_view to_string(Sort sort);

/// A control socket call that a key requested and the user confirmed.
struct Order {
    std::string method;
    std::string model;
    boost::json::object params;
};

/// What a key requests beyond a change of the screen.
struct Effect {
    bool quit = false;
    std::optional<Order> order{};
};

/// Everything that a frame shows and that keys change. Reads no clock and no terminal.
struct Screen {
    Snapshot snapshot;
    std::deque<std::string> events;  ///< newest last, at most `events_max`
    std::string trouble;             ///< why the snapshot is old; empty if it is not
    std::string notice;              ///< outcome of the last order
    bool notice_is_bad = false;

    Sort sort = Sort::fleet;
    bool backwards = false;
    std::string filter;
    std::string chosen;         ///< a row's title; empty: the first row
    std::size_t first_row = 0;  ///< the first table row shown
    enum class Mode : std::uint8_t { table, filter, question, help } mode = Mode::table;
    std::string question;
    std::optional<Order> asked;  ///< carried out if the answer is yes

    static constexpr std::size_t events_max = 32;

    /// Adds a notification of the daemon; ignores those that come with every request.
    void add_event(const boost::json::object& event);
    /// Shows the outcome of an order.
    void tell(std::string text, bool is_bad);
    [[nodiscard]] Effect press(const Key& key);

    /// The rows as shown: filtered and sorted.
    [[nodiscard]] std::vector<const WorkerRow*> rows() const;
    /// Index of the cursor's row in `rows`; 0 if it is gone.
    [[nodiscard]] std::size_t chosen_row(const std::vector<const WorkerRow*>& rows) const;

private:
    void move(std::ptrdiff_t by);
    void ask(std::string_view verb, Order order);
    void press_in_table(const Key& key, Effect& effect);
    void press_in_filter(const Key& key);
};

}  // namespace bulkhead::cli::top

#pragma once

#include <algorithm>
#include <cstddef>
#include <string_view>

#include "supervisor/states/lifecycle.h"

namespace bulkhead::supervisor {

struct MessageAnswer {
    std::string_view type;
    std::string_view in_state;  ///< one character for each WorkerState: '+' taken, '!' complained
                                ///< about, '.' ignored
};

// clang-format off
/// Every message of the worker link, in the order of worker_link::Message, for every state:
/// stopped, adopting, spawning, loading, capturing, ready, busy, draining, stopping, reclaiming,
/// crashed, backoff, quarantined. While a worker is adopted, its messages before the hello may be
/// outdated: only final ones are taken. scripts/reference.py copies this table to
/// docs/worker-link.md.
inline constexpr MessageAnswer message_answers[] = {
    //                   saslcrbdsrcbq
    {"hello",           ".++!!!!!!!!.."},
    {"progress",        "...++........"},
    {"grant_asked",     "..+++!!!!!!.."},
    {"ready",           ".+!++!!!!!!.."},
    {"failed",          ".++++........"},
    {"channel_opened",  "..+++++++++.."},
    {"channel_closed",  "..+++++++++.."},
    {"channel_refused", "..+++++++++.."},
    {"busy",            ".....+......."},
    {"idle",            "......+......"},
    {"statistics",      ".++++++++++.."},
    {"overrun",         ".+++++++....."},
    {"drained",         ".+!!!!!+!!!.."},
    {"dying",           ".++++++++++.."},
    {"backtrace",       ".++++++++++.."},
    {"unknown",         "..+++++++++.."},
};
// clang-format on
static_assert(std::ranges::all_of(message_answers, [](const MessageAnswer& one) {
    return one.in_state.size() == worker_state_count && one.in_state.find_first_not_of("+!.") == std::string_view::npos;
}));

/// Checks that a message is taken only in states that have its transition: otherwise a worker
/// could crash us.
constexpr bool fits(std::string_view type, WorkerEvent event) {
    const auto* const answer = std::ranges::find(message_answers, type, &MessageAnswer::type);
    for (std::size_t state = 0; state < worker_state_count; ++state)
        if (answer->in_state[state] == '+' && !next(static_cast<WorkerState>(state), event)) return false;
    return true;
}
static_assert(fits("busy", WorkerEvent::became_busy) && fits("idle", WorkerEvent::became_idle));
static_assert(fits("ready", WorkerEvent::became_ready) && fits("drained", WorkerEvent::stop_asked));
static_assert(fits("overrun", WorkerEvent::lost) && fits("failed", WorkerEvent::lost));

}  // namespace bulkhead::supervisor

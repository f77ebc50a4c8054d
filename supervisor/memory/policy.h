#pragma once

#include <array>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "supervisor/memory/action.h"

namespace bulkhead::supervisor::memory {

struct State;

/// What a load would do now.
struct Plan {
    enum class Outcome : std::uint8_t {
        serves,   ///< the model is ready
        loads,    ///< the model is loading
        fits,     ///< fits without an eviction
        evicts,   ///< fits after evicting `victims`
        waits,    ///< for turns, `min_resident`, requests of a higher priority, or earlier waiters
        refused,  ///< can never fit under the present limits
    };
    Outcome outcome{};
    std::vector<action::Grant> pieces;  ///< what would be loaded, and where
    std::vector<ReplicaId> victims;     ///< replicas that would be evicted
    std::optional<Millis> expected;     ///< time until ready; empty: not known, or never
    std::string why;                    ///< one sentence, with sizes
};
[[nodiscard]] constexpr std::string_view to_string(Plan::Outcome outcome) {
    constexpr std::array<std::string_view, 6> names{"serves", "loads", "fits", "evicts", "waits", "refused"};
    return names[static_cast<std::size_t>(outcome)];
}

/// Decides where models run, which are evicted and which wait: a state machine of events and
/// actions. Reads no clock, starts no process, calls no one: each event comes with the time, and
/// the caller carries out the actions.
///
/// Rules   docs/operations.md
/// Thread  one
/// Use     carry out the actions in order, then send the resulting events; call `on(Tick)`
///         at `next_tick()`
class Policy {
public:
    explicit Policy(Footprints known = {});
    ~Policy();

    /// `now` never goes back. Events about unknown models or devices are ignored.
    [[nodiscard]] Actions on(const Event& event, Time now);
    /// When time alone may change something; empty: never.
    [[nodiscard]] std::optional<Time> next_tick() const;

    [[nodiscard]] Plan plan(const std::string& model, Time now) const;
    /// Returns sentences: why the model is loaded, not loaded, on this device, or waits, and the
    /// basis of its figure.
    [[nodiscard]] std::string why(const std::string& model, Time now) const;

    [[nodiscard]] std::vector<DeviceLedger> ledger() const;
    [[nodiscard]] std::vector<Holding> holdings() const;
    /// Write to disk when it differs from the last written value.
    [[nodiscard]] const Footprints& footprints() const;
    /// Returns what a load of the model on this device would reserve.
    [[nodiscard]] Need need(const std::string& model, const DeviceId& device) const;
    /// Empty if the policy has no entry for it.
    [[nodiscard]] std::optional<Holding> holding(const ReplicaId& who) const;
    /// When an idle replica will be unloaded by `keep_alive` or as surplus; empty: not by time.
    [[nodiscard]] std::optional<Time> unload_at(const ReplicaId& who) const;
    [[nodiscard]] std::size_t waiting(const std::string& model) const;  ///< tickets
    [[nodiscard]] bool is_pinned(const std::string& model) const;
    [[nodiscard]] const State& state() const { return *state_; }

private:
    std::unique_ptr<State> state_;
};

}  // namespace bulkhead::supervisor::memory

#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "supervisor/memory/action.h"

namespace bulkhead::supervisor::memory {

struct State;

/// What a load would do now.
struct Plan {
    enum class Outcome : std::uint8_t {
        serves,   ///< it is ready
        loads,    ///< it is being loaded
        fits,     ///< without an eviction
        evicts,   ///< after `victims`
        waits,    ///< for others' turns, `min_resident`, requests of a higher priority, or whoever is before it
        refused,  ///< it can never fit as things are
    };
    struct Piece {
        ReplicaId who;
        DeviceId device;
        Bytes device_bytes = 0;
        Bytes host_bytes = 0;
        Basis basis{};
    };
    Outcome outcome{};
    std::vector<Piece> pieces;       ///< what would be loaded, and where
    std::vector<ReplicaId> victims;  ///< who would go
    std::optional<Millis> expected;  ///< until it is ready; empty: not known, or never
    std::string why;                 ///< a sentence, with sizes
};
[[nodiscard]] std::string_view to_string(Plan::Outcome outcome);

/// Who may run where, who goes, who waits: a machine of events and actions. It reads no clock, starts no process and
/// calls nobody: each event brings the time, its actions are what the caller is to do.
///
/// Rules   docs/operations.md
/// Thread  one
/// Use     carry the actions out in order, then send what follows from them; call `on(Tick)` at `next_tick()`
class Policy {
public:
    explicit Policy(Footprints known = {});
    ~Policy();

    /// `now` never goes back. Events on what the policy does not know are ignored.
    [[nodiscard]] Actions on(const Event& event, Time now);
    /// When something can change by time alone; empty: never.
    [[nodiscard]] std::optional<Time> next_tick() const;

    [[nodiscard]] Plan plan(const std::string& model, Time now) const;
    /// Why it is loaded, not loaded, here, or waits, and from what its figure comes: sentences.
    [[nodiscard]] std::string why(const std::string& model, Time now) const;

    [[nodiscard]] std::vector<DeviceLedger> ledger() const;
    [[nodiscard]] std::vector<Holding> holdings() const;
    /// To be written to disk when it differs from what was written last.
    [[nodiscard]] const Footprints& footprints() const;
    /// What a load of the model on this device would reserve.
    [[nodiscard]] Need need(const std::string& model, const DeviceId& device) const;
    /// Empty where the policy has no books of it.
    [[nodiscard]] std::optional<Holding> holding(const ReplicaId& who) const;
    /// When an idle replica will be unloaded by `keep_alive`, or as a surplus one; empty: not by time.
    [[nodiscard]] std::optional<Time> unload_at(const ReplicaId& who) const;
    [[nodiscard]] std::size_t waiting() const;  ///< tickets
    [[nodiscard]] std::size_t waiting(const std::string& model) const;
    [[nodiscard]] bool is_pinned(const std::string& model) const;

private:
    std::unique_ptr<State> state_;
};

}  // namespace bulkhead::supervisor::memory

#pragma once

/// The policy's books, and the operations that change them together with the ledger. Internal
/// to this folder.

#include <algorithm>
#include <deque>
#include <limits>
#include <list>
#include <map>
#include <optional>
#include <ranges>
#include <string>
#include <vector>

#include "supervisor/memory/action.h"
#include "supervisor/memory/limits.h"

namespace bulkhead::supervisor::memory {

enum class Phase : std::uint8_t {
    none,
    placed,   ///< has its device; waits for receipts
    loading,  ///< granted
    ready,
    draining,    ///< ending, by us or by others
    reclaiming,  ///< ended, without a receipt
};

/// Below every model's priority: such a request evicts only what is not in use, of a preload also
/// no other preload.
inline constexpr int preload_priority = std::numeric_limits<int>::min();
inline constexpr int lowest_priority = preload_priority + 1;
/// Workers whose model a reload has removed.
inline constexpr int undeclared_priority = lowest_priority + 1;

struct Model;

/// One replica.
struct Slot {
    Model* model = nullptr;
    std::uint32_t replica = 0;
    Phase phase = Phase::none;
    bool quarantined = false;
    std::size_t device = 0;
    Bytes device_bytes = 0;  ///< held by the ledger, or to be held once granted
    Bytes host_bytes = 0;
    Bytes mapped_bytes = 0;
    Basis basis{};
    bool estimated = false;  ///< ready, not yet measured while serving: keeps the granted figure
    Bytes peak_before = 0;   ///< serving peak of earlier workers, when this one became ready
    Bytes host_peak_before = 0;
    std::uint64_t placed_as = 0;  ///< order of grants
    std::optional<int> lent;      ///< the priority of a long wait, until its turn is over
    std::string placed_why;       ///< why on this device; empty if a former supervisor placed it
    Time ready_at{};
    Time idle_since{};
    Time turn_until{};
    std::uint32_t in_flight = 0;
    bool is_presumed_busy = false;  ///< adopted, and `in_flight` is not known yet
    std::uint32_t channels = 0;
    bool used = false;            ///< had a request since it became ready
    bool ran_out = false;         ///< a request of it failed for want of memory
    Bytes grows = 0;              ///< that it gets for that on its device, once they are free
    std::optional<Time> awaited;  ///< until when the first request of a new channel is awaited, or
                                  ///< the next after one that ran out of memory

    [[nodiscard]] ReplicaId id() const;
    /// Empty before its grant.
    [[nodiscard]] std::optional<Holds> holds() const;
    /// What the ledger counts for it on this device, or is to count once it is granted.
    [[nodiscard]] Bytes bytes_on(std::size_t where) const {
        return (where == device ? device_bytes : 0) + (where == 0 ? host_bytes : 0);
    }
    [[nodiscard]] bool is_starting() const { return phase == Phase::placed || phase == Phase::loading; }
    [[nodiscard]] bool is_going() const { return phase == Phase::draining || phase == Phase::reclaiming; }
    /// More than the declared least: unloaded after a short idle time, pinned or not.
    [[nodiscard]] bool is_surplus() const;
    [[nodiscard]] bool is_placed_surplus() const { return phase == Phase::placed && is_surplus(); }
};

struct Unit;

struct Model {
    Declaration declared;
    bool known = true;  ///< false: a reload removed it, but a worker is left
    bool pinned = false;
    Unit* unit = nullptr;
    std::deque<Slot> slots;  ///< by replica; addresses are stable
    std::optional<Time> pressed_since;
    std::string last;  ///< the last decision, one sentence
    std::optional<Time> last_at;
    /// The replica that `last` says was evicted, until its receipt.
    std::optional<ReplicaId> evicted;
};

/// What loads and ends as one: a together group, or a single model.
struct Unit {
    std::vector<Model*> models;
    bool together = false;
    [[nodiscard]] auto slots() const {
        return models | std::views::transform([](Model * one) -> auto& { return one->slots; }) | std::views::join;
    }
    /// Does it hold for any replica?
    template <typename Is>
    [[nodiscard]] bool any(Is is) const {
        return std::ranges::any_of(slots(), is);
    }
};

struct Waiter {
    Ticket ticket = 0;
    Model* model = nullptr;
    Asker asker{};
    std::string client;
    std::optional<Time> deadline;
    bool for_room = false;  ///< the deadline does not apply during the load
    std::size_t told_position = 0;
    std::optional<Time> told_expected;
};

/// All waiters of one unit.
struct Entry {
    Unit* unit = nullptr;
    std::uint64_t number = 0;  ///< first come, first served
    Time since{};              ///< of its first waiter
    std::list<Waiter> waiters;
    bool retried = false;  ///< second try, after memory ran out
    std::optional<Time> expected;
    std::string why;

    [[nodiscard]] bool has_preload() const {
        return std::ranges::any_of(waiters, [](const Waiter& one) { return one.asker == Asker::preload; });
    }
    /// Nobody else waits for it.
    [[nodiscard]] bool is_preload() const {
        return has_preload() &&
               std::ranges::all_of(waiters, [](const Waiter& one) { return one.asker == Asker::preload; });
    }
};

/// A reclaim under way.
struct Reclaim {
    Ticket ticket = 0;
    std::size_t device = 0;
    Time deadline{};
    Bytes asked = 0;
    Bytes promised = 0;  ///< its part of the device's promise
    Bytes freed = 0;
    std::vector<ReplicaId> awaited;
    std::vector<ReplicaId> ended;
};

struct Device {
    DeviceLedger books;
    DeviceLimit limit;
    Bytes promise = 0;  ///< of all reclaims, at the time of the last request
    Bytes foreign_at_promise = 0;
    std::optional<Time> promise_until;
    std::string kind;  ///< of its footprints
};

template <typename Models>
[[nodiscard]] auto slots_of(Models& models) {
    return models | std::views::values | std::views::transform([](auto& model) -> auto& { return model.slots; }) |
           std::views::join | std::views::filter([](const Slot& slot) { return slot.phase != Phase::none; });
}

[[nodiscard]] inline std::string device_text(const DeviceId& id) { return id == host ? "the host" : id; }

struct State {
    std::vector<Device> devices;  ///< 0 is the host
    std::map<DeviceId, DeviceLimit> limits;
    std::map<std::string, Model> models;
    std::list<Unit> units;
    std::list<Entry> entries;  ///< by their order
    std::list<Reclaim> reclaims;
    Footprints footprints;
    int highest_priority = 0;  ///< of all models declared
    std::uint64_t number_last = 0;
    std::uint64_t placed_last = 0;
    /// By device, if a waiter gets it within bounded time: a later caller may not evict there, nor
    /// use more than this many bytes.
    std::vector<std::optional<std::int64_t>> claims;
    Clock::duration queued_for{};  ///< expected wait of the claims, one after the other
    std::optional<Time> next;      ///< when time alone changes something
    Actions actions;               ///< for the present event

    [[nodiscard]] std::optional<std::size_t> device_of(const DeviceId& id) const;
    /// "the host", "GPU-0123"
    [[nodiscard]] std::string text_of(std::size_t device) const { return device_text(devices[device].books.id); }
    /// Those of its devices that are known, in the order of its list.
    [[nodiscard]] std::vector<std::size_t> devices_of(const Model& model) const;
    [[nodiscard]] std::size_t device_or_new(const DeviceId& id);
    void apply_limit(Device& device);
    void settle_promise(Device& device);
    /// Free memory of the whole device, regardless of limit and margin: neither used nor
    /// promised earlier.
    [[nodiscard]] static std::int64_t free_for_others(const Device& device);
    [[nodiscard]] Slot* find(const ReplicaId& who);
    [[nodiscard]] Model* find(const std::string& model);
    [[nodiscard]] Entry* entry_of(const Unit& unit);
    /// Returns the priority of its models, or the highest of all once it has waited for
    /// `limits::patience`; a preload's is below all.
    [[nodiscard]] int priority_of(const Entry& entry, Time now) const;
    /// A unit with waiters whose load is under way: its ready parts stay until it is complete.
    [[nodiscard]] bool is_being_loaded(const Unit& unit) const;
    /// All but those of `Phase::none`.
    [[nodiscard]] auto slots() { return slots_of(models); }
    [[nodiscard]] auto slots() const { return slots_of(models); }

    /// The only way to change a phase: updates the ledger too.
    void enter(Slot& slot, Phase phase);
    /// Sets a new figure of what the slot holds.
    void hold(Slot& slot, Bytes device_bytes, Bytes host_bytes, Bytes mapped_bytes);

    // For a model on this device.
    [[nodiscard]] std::string key_of(const Model& model, std::size_t device) const {
        return footprint_key(model.declared.key, devices[device].kind);
    }
    [[nodiscard]] const Footprint& footprint_of(const Model& model, std::size_t device) const {
        return footprints.find(key_of(model, device));
    }
    [[nodiscard]] Need need_of(const Model& model, std::size_t device) const;
    /// What was measured or estimated: `need_of` before its correction.
    [[nodiscard]] Need uncorrected_need_of(const Model& model, std::size_t device) const;
    /// Memory ran out: gives the model a quarter more than its figure, but no more than its
    /// device can give.
    /// `beside`  the host's memory of a worker on a GPU ran out
    /// `ended`   so did its process: what it took may have been a leak
    void correct(const Slot& slot, bool beside, bool ended, std::int64_t unix_ms);
    /// Returns what the load of a starting replica gives back when it is ready: of an unknown size
    /// all but a byte.
    [[nodiscard]] Bytes returned_at_ready(const Slot& slot) const;
    /// Returns what the device can give once all other models are unloaded that are not pinned.
    [[nodiscard]] Bytes alone_on(std::size_t device, const Model& model) const;
    [[nodiscard]] Millis load_time(const Model& model, std::size_t device) const;
    [[nodiscard]] Millis reclaim_time(const Model& model, std::size_t device) const;
    [[nodiscard]] Millis turn_of(const Model& model, std::size_t device) const;
    [[nodiscard]] Millis gap_of(const Model& model, std::size_t device) const;
    /// Until when a pause after use does not count as the end of use.
    [[nodiscard]] Time in_use_until(const Slot& slot) const;
    /// Returns what the ledger counts for the slot; empty: nothing.
    [[nodiscard]] std::optional<Holding> holding(const Slot& slot) const;
    /// Returns replicas of the unit's minimum that are neither loaded nor about to be.
    /// `with_quarantined`  as if a person had lifted that
    [[nodiscard]] std::vector<Slot*> missing(const Unit& unit, bool with_quarantined = false);

    void wake_at(Time when) {
        if (!next || when < *next) next = when;
    }
    void note(Model& model, std::string sentence, Time now) {
        model.last = std::move(sentence);
        model.last_at = now;
        model.evicted.reset();
    }

private:
    void book(const Slot& slot, bool add);
};

[[nodiscard]] inline Millis millis(Clock::duration duration) { return std::chrono::duration_cast<Millis>(duration); }
[[nodiscard]] int priority_of(const Unit& unit);
[[nodiscard]] bool is_pinned(const Unit& unit);

}  // namespace bulkhead::supervisor::memory

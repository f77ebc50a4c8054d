#pragma once

/// The policy's own books, and what changes them together with the ledger. Only sources of this folder include it.

#include <deque>
#include <list>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "supervisor/memory/action.h"
#include "supervisor/memory/limits.h"

namespace bulkhead::supervisor::memory {

enum class Phase : std::uint8_t {
    none,
    placed,   ///< has its device; waits for receipts
    leaving,  ///< was placed, is not wanted any more
    loading,  ///< granted
    ready,
    draining,    ///< on its way out, by us or by others
    reclaiming,  ///< ended, without a receipt
};

struct Model;

/// One replica.
struct Slot {
    Model* model = nullptr;
    std::uint32_t replica = 0;
    Phase phase = Phase::none;
    std::size_t device = 0;
    Bytes device_bytes = 0;  ///< that it holds by the ledger, or will when granted
    Bytes host_bytes = 0;
    Bytes mapped_bytes = 0;
    Basis basis{};
    bool estimated = false;       ///< ready, and not yet measured while it served: it keeps what it was granted
    std::uint64_t placed_as = 0;  ///< grants go in this order
    std::string placed_why;       ///< on its device; empty where a former supervisor placed it
    Time ready_at{};
    Time idle_since{};
    Time turn_until{};
    std::uint32_t in_flight = 0;
    std::uint32_t channels = 0;
    bool used = false;            ///< since it became ready
    std::optional<Time> awaited;  ///< the first request of a channel that was just opened: until when

    [[nodiscard]] ReplicaId id() const;
    /// On its device's books, or about to be.
    [[nodiscard]] bool is_there() const { return phase != Phase::none && phase != Phase::leaving; }
    [[nodiscard]] bool is_starting() const { return phase == Phase::placed || phase == Phase::loading; }
    [[nodiscard]] bool is_going() const { return phase == Phase::draining || phase == Phase::reclaiming; }
};

struct Unit;

struct Model {
    Declaration declared;
    bool known = true;  ///< false: a reload has removed it, and a worker is left
    bool pinned = false;
    Unit* unit = nullptr;
    std::deque<Slot> slots;  ///< by replica; they keep their places
    std::optional<Time> pressed_since;
    std::string last;  ///< what was last decided about it, a sentence
    std::optional<Time> last_at;
};

/// What loads and goes as one: a together group, or one model.
struct Unit {
    std::vector<Model*> models;
    bool together = false;
};

struct Waiter {
    Ticket ticket = 0;
    Model* model = nullptr;
    Asker asker{};
    std::string client;
    std::optional<Time> deadline;
    bool for_room = false;  ///< the deadline does not count while it loads
    std::size_t told_position = 0;
};

/// Everybody who waits for one unit.
struct Entry {
    Unit* unit = nullptr;
    std::uint64_t number = 0;  ///< first come, first served
    std::list<Waiter> waiters;
    bool retried = false;  ///< memory ran out once
    std::optional<Time> expected;
    std::string why;
};

/// A reclaim under way.
struct Reclaim {
    Ticket ticket = 0;
    std::size_t device = 0;
    std::string client;
    std::optional<Time> deadline;
    Bytes asked = 0;
    Bytes promised = 0;  ///< of its device's promise
    Bytes freed = 0;
    std::vector<ReplicaId> awaited;
    std::vector<ReplicaId> ended;
};

struct Device {
    DeviceLedger books;
    DeviceLimit limit;
    Bytes promise = 0;  ///< of all reclaims, as it was when the last was asked
    Bytes foreign_at_promise = 0;
    std::optional<Time> promise_until;
};

struct State {
    std::vector<Device> devices;  ///< 0 is the host
    std::map<DeviceId, DeviceLimit> limits;
    std::map<std::string, Model> models;
    std::list<Unit> units;
    std::list<Entry> entries;  ///< by their order
    std::list<Reclaim> reclaims;
    Footprints footprints;
    std::uint64_t number_last = 0;
    std::uint64_t placed_last = 0;
    std::size_t tickets = 0;
    std::map<std::string, std::size_t> tickets_of;
    /// By device: who waits for it in bounded time, so that nobody who comes later may evict there, or use more than so
    /// many bytes of it.
    std::vector<std::optional<std::int64_t>> claims;
    Clock::duration queued_for{};  ///< expected of those with a claim, one after the other
    std::optional<Time> next;      ///< when time alone changes something
    Actions actions;               ///< of the present event

    [[nodiscard]] std::optional<std::size_t> device_of(const DeviceId& id) const;
    [[nodiscard]] std::size_t device_or_new(const DeviceId& id);
    void apply_limit(Device& device);
    void settle_promise(Device& device);
    /// Of the whole device, without limit and margin: neither used, nor promised to somebody before.
    [[nodiscard]] static std::int64_t free_for_others(const Device& device);
    [[nodiscard]] Slot* find(const ReplicaId& who);
    [[nodiscard]] Model* find(const std::string& model);
    [[nodiscard]] const Model* find(const std::string& model) const;
    [[nodiscard]] Entry* entry_of(const Unit& unit);
    /// Somebody waits for it, and a part of it is on its way: the other parts stay until it is complete.
    [[nodiscard]] bool is_being_loaded(const Unit& unit) const;
    template <typename Visit>
    void each_slot(Visit visit) const {
        for (const auto& [name, model] : models)
            for (const Slot& slot : model.slots)
                if (slot.phase != Phase::none) visit(slot);
    }

    /// The one way into another phase: the ledger follows.
    void enter(Slot& slot, Phase phase);
    /// A new figure of what it holds.
    void hold(Slot& slot, Bytes device_bytes, Bytes host_bytes, Bytes mapped_bytes);

    // Of a model on this device.
    [[nodiscard]] static std::string key_of(const Model& model, std::size_t device) {
        return footprint_key(model.declared.key, device != 0);
    }
    [[nodiscard]] const Footprint* footprint_of(const Model& model, std::size_t device) const {
        return footprints.find(key_of(model, device));
    }
    [[nodiscard]] Need need_of(const Model& model, std::size_t device) const;
    [[nodiscard]] Millis load_time(const Model& model, std::size_t device) const;
    [[nodiscard]] Millis reclaim_time(const Model& model, std::size_t device) const;
    [[nodiscard]] Millis turn_of(const Model& model, std::size_t device) const;
    [[nodiscard]] Millis gap_of(const Model& model, std::size_t device) const;
    /// A pause after use that does not count as the end of it: until when.
    [[nodiscard]] Time in_use_until(const Slot& slot) const;
    /// What the ledger counts of it; empty: nothing.
    [[nodiscard]] std::optional<Holding> holding(const Slot& slot) const;
    [[nodiscard]] std::vector<Holding> holdings() const;
    /// Replicas of the unit's minimum that are neither there nor about to be.
    [[nodiscard]] std::vector<Slot*> missing(const Unit& unit);

    void wake_at(Time when) {
        if (!next || when < *next) next = when;
    }
    void note(Model& model, std::string sentence, Time now) {
        model.last = std::move(sentence);
        model.last_at = now;
    }

private:
    void book(const Slot& slot, bool add);
};

[[nodiscard]] inline Millis millis(Clock::duration duration) { return std::chrono::duration_cast<Millis>(duration); }
[[nodiscard]] int priority_of(const Unit& unit);
[[nodiscard]] bool is_pinned(const Unit& unit);

}  // namespace bulkhead::supervisor::memory

#pragma once

#include <map>
#include <optional>
#include <utility>
#include <vector>

#include <boost/container/small_vector.hpp>

#include "supervisor/memory/state.h"

namespace bulkhead::supervisor::memory {

/// A worker, or the workers of a together group, that could be evicted, and the memory
/// this would free.
struct Candidate {
    boost::container::small_vector<const Slot*, 2> slots;
    const Unit* unit = nullptr;
    int priority = 0;
    bool pinned = false;
    bool preload = false;
    bool starting = false;   ///< at least one of them is not ready yet
    Time protected_until{};  ///< by `min_resident`
    Time in_use_until{};     ///< `Time::max()`: busy now
    Time turn_until{};       ///< while it is in use
    Time idle_since{};
    boost::container::small_vector<Bytes, 4> freed;  ///< by device
};

/// Which victims a search considers: those that may go now, in bounded time, or ever.
enum class Reach : std::uint8_t { now, bounded, ever };

/// Different models of one exclusive group.
[[nodiscard]] bool exclude_each_other(const Model& a, const Model& b);
/// Another member of its exclusive group that has memory on its device; null: there is none.
[[nodiscard]] const Slot* company_of(const State& state, const Slot& slot);

/// A replica to be placed.
struct Piece {
    const Slot* slot = nullptr;
    boost::container::small_vector<Need, 4> needs;  ///< by device, where it may run
    [[nodiscard]] const Need& need(std::size_t device) const { return needs[device]; }
    /// At least one where the need is unknown.
    [[nodiscard]] std::int64_t bytes(std::size_t device) const {
        return need(device).basis == Basis::unknown ? 1 : signed_of(need(device).device);
    }
};
[[nodiscard]] std::vector<Piece> pieces_of(const State& state, const std::vector<Slot*>& slots);

/// A way to place all pieces.
struct Option {
    std::vector<std::size_t> device;   ///< for each piece
    std::vector<std::size_t> victims;  ///< indices of candidates
    std::vector<Bytes> bytes;  ///< for each piece on its device: its need, or all that is free if
                               ///< the need is unknown
    Time when{};               ///< when the last victim may go
    bool behind_priority = false;  ///< a busy victim has a higher priority: the time is unknown
    const Slot* load = nullptr;    ///< returns memory once it is ready, or as surplus
                                   ///< once it is idle

    /// Larger is worse. Compares the victims, then how many replicas of a model share a device,
    /// then the devices' places in their lists, then how full the devices become.
    struct Cost {
        int use = -1;  ///< of the most used victim: 0 idle, 1 between two requests, 2 busy; -1
                       ///< without victims
        int priority = 0;
        std::size_t victims = 0;
        std::size_t together = 0;
        std::size_t down_the_list = 0;
        std::int64_t lacking = 0;  ///< negative: remaining room
        friend auto operator<=>(const Cost&, const Cost&) = default;
    } cost;
};

/// All devices and workers at one moment, reduced to what a placement needs.
class Survey {
public:
    /// `loads`  as if replicas of this unit beyond the minimum that have no grant had given their
    ///          places up for it; null: as it is
    Survey(const State& state, Time now, const Unit* loads = nullptr);

    /// Returns the best way to place all pieces together for a caller of this priority.
    [[nodiscard]] std::optional<Option> place(const std::vector<Piece>& pieces, int priority, Reach reach) const;
    /// The victims that together free at least `short_by` now; `but`: none of this unit.
    struct Victims {
        /// The fewest that suffice; if none do, all that help.
        std::vector<std::size_t> candidates;
        bool enough = false;
    };
    /// `short_by`  bytes by device
    [[nodiscard]] Victims victims_for(const std::vector<std::int64_t>& short_by, int priority,
                                      const Unit* but = nullptr) const;
    [[nodiscard]] Victims victims_for(std::size_t device, std::int64_t bytes, int priority,
                                      const Unit* but = nullptr) const;
    /// Busy with a higher priority than the caller's: stays until it is idle.
    [[nodiscard]] static bool is_behind(const Candidate& one, int priority) {
        return one.in_use_until == Time::max() && priority < one.priority;
    }
    /// Returns when it may go for a caller of this priority; empty: not within `reach`.
    [[nodiscard]] std::optional<Time> may_go(const Candidate& one, int priority, Reach reach) const;

    [[nodiscard]] const std::vector<Candidate>& candidates() const { return candidates_; }
    /// Room that is free or about to be, and reserved for no waiter.
    [[nodiscard]] std::int64_t room(std::size_t device) const { return room_[device]; }
    [[nodiscard]] int use_of(const Candidate& one) const;  ///< as in `Option::Cost`
    [[nodiscard]] std::int64_t promised_room(std::size_t device) const;
    /// Room that comes without an eviction: when a load is over, and when a surplus
    /// replica was idle.
    [[nodiscard]] std::int64_t returned_room(const Candidate& one, std::size_t device) const;
    /// Room if every candidate went that may go within `reach`.
    [[nodiscard]] std::int64_t room_within(Reach reach, std::size_t device, int priority) const;

private:
    /// Room that no waiter reserved, by device.
    [[nodiscard]] std::vector<std::int64_t> free_rooms() const;
    /// Likewise, if everyone went who may go within `reach`, but none of the unit that is to
    /// be placed.
    [[nodiscard]] std::vector<std::int64_t> rooms_for(const Unit& own, int priority, Reach reach) const;
    using Allowed = std::vector<std::vector<std::size_t>>;  ///< devices, by piece
    /// Returns a way to place them in these rooms, where there are too many to compare.
    [[nodiscard]] std::optional<Option> deal(const std::vector<Piece>& pieces, const Allowed& allowed, int priority,
                                             Reach reach, std::vector<std::int64_t> left) const;
    /// Returns where there may be a place within `reach`.
    [[nodiscard]] std::vector<std::size_t> devices_for(const Piece& piece, const std::vector<std::int64_t>& rooms,
                                                       Reach reach) const;
    [[nodiscard]] std::optional<Option> try_devices(const std::vector<Piece>& pieces,
                                                    const std::vector<std::size_t>& devices, int priority,
                                                    Reach reach) const;
    [[nodiscard]] std::optional<std::int64_t> claim_of(std::size_t device) const {
        return device < state_.claims.size() ? state_.claims[device] : std::nullopt;
    }
    /// Reduces `listed` to the fewest that free what is missing, best victims first. False: all
    /// do not suffice.
    [[nodiscard]] bool choose(std::vector<std::size_t>& listed, const std::vector<std::int64_t>& short_by) const;

    const State& state_;
    Time now_;
    std::vector<Candidate> candidates_;
    std::vector<std::vector<std::size_t>> on_device_;  ///< candidates
    std::vector<std::int64_t> room_;
    mutable std::map<std::pair<Reach, int>, std::vector<std::int64_t>> room_within_;  ///< cache
};

}  // namespace bulkhead::supervisor::memory

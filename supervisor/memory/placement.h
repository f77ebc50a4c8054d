#pragma once

#include <limits>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include <boost/container/small_vector.hpp>

#include "supervisor/memory/state.h"

namespace bulkhead::supervisor::memory {

/// A worker, or a together group's workers, that could go, and what the devices would get back.
struct Candidate {
    boost::container::small_vector<const Slot*, 2> slots;
    const Unit* unit = nullptr;
    int priority = 0;
    bool pinned = false;
    bool starting = false;   ///< one of them is not ready yet
    Time protected_until{};  ///< by `min_resident`
    Time in_use_until{};     ///< `Time::max()`: busy
    Time turn_until{};       ///< while it is in use
    Time idle_since{};
    boost::container::small_vector<std::pair<std::size_t, Bytes>, 2> freed;  ///< by device

    [[nodiscard]] Bytes freed_on(std::size_t device) const;
};

/// What is looked for: victims that may go now, those that may in bounded time, those that may at all.
enum class Reach : std::uint8_t { now, bounded, ever };

/// Below every model's: who asks takes the place only of what is not in use.
inline constexpr int lowest_priority = std::numeric_limits<int>::min();
inline constexpr int undeclared_priority = lowest_priority + 1;  ///< of workers whose model a reload has removed

/// A replica that is to be placed.
struct Piece {
    const Slot* slot = nullptr;
    Need on_gpu;
    Need on_host;
    [[nodiscard]] const Need& need(std::size_t device) const { return device == 0 ? on_host : on_gpu; }
};
[[nodiscard]] std::vector<Piece> pieces_of(const State& state, const std::vector<Slot*>& slots);

/// A way to place all pieces.
struct Option {
    std::vector<std::size_t> device;   ///< of each piece
    std::vector<std::size_t> victims;  ///< candidates
    std::vector<Bytes> bytes;  ///< of each piece on its device: what it needs, or all there is where that is unknown
    Time when{};               ///< the last victim may go
    bool behind_priority = false;  ///< of a victim that is busy and of a higher priority: nobody knows when it may go

    /// Worse is larger: whom it evicts, then how many replicas of a model share a device, then how far down their lists
    /// the devices are, then how full they become.
    struct Cost {
        int use = -1;  ///< of the worst victim: 0 idle, 1 between two requests, 2 busy; -1 without victims
        int priority = 0;
        std::size_t victims = 0;
        std::size_t together = 0;
        std::size_t down_the_list = 0;
        std::int64_t lacking = 0;  ///< negative: room that is left
        friend auto operator<=>(const Cost&, const Cost&) = default;
    } cost;
};

/// All devices and workers at one moment, as far as a placement needs them.
class Survey {
public:
    Survey(const State& state, Time now);

    /// The best way to place all pieces together for somebody of this priority.
    [[nodiscard]] std::optional<Option> place(const std::vector<Piece>& pieces, int priority, Reach reach) const;
    /// Who goes at once so that `bytes` more come free on the device.
    struct Victims {
        std::vector<std::size_t> candidates;  ///< the fewest that suffice; all there are where none do
        bool enough = false;
    };
    [[nodiscard]] Victims victims_for(std::size_t device, std::int64_t bytes, int priority) const;
    /// In use, and not to go for somebody of this lower priority before it is idle.
    [[nodiscard]] static bool is_behind(const Candidate& one, int priority) {
        return one.in_use_until == Time::max() && priority < one.priority;
    }
    /// When it may go for somebody of this priority; empty: not within `reach`.
    [[nodiscard]] std::optional<Time> may_go(const Candidate& one, int priority, Reach reach) const;

    [[nodiscard]] const std::vector<Candidate>& candidates() const { return candidates_; }
    /// Free, or about to come free, and meant for nobody.
    [[nodiscard]] std::int64_t room(std::size_t device) const { return room_[device]; }
    [[nodiscard]] int use_of(const Candidate& one) const;  ///< as in `Option::Cost`
    [[nodiscard]] std::int64_t promised_room(std::size_t device) const;
    /// Room there would be if all went that may within `reach`.
    [[nodiscard]] std::int64_t room_within(Reach reach, std::size_t device, int priority) const;
    /// Whether there may be a place within `reach`: false is certain, and cheaper than to look for the place.
    [[nodiscard]] bool may_fit(const Piece& piece, std::size_t device, int priority, Reach reach) const;
    [[nodiscard]] bool may_fit(const std::vector<Piece>& pieces, int priority, Reach reach) const;

private:
    [[nodiscard]] std::vector<std::size_t> devices_for(const Piece& piece, int priority, Reach reach) const;
    [[nodiscard]] std::optional<Option> try_devices(const std::vector<Piece>& pieces,
                                                    const std::vector<std::size_t>& devices, int priority,
                                                    Reach reach) const;
    [[nodiscard]] std::optional<std::int64_t> claim_of(std::size_t device) const {
        return device < state_.claims.size() ? state_.claims[device] : std::nullopt;
    }
    /// Of those listed, the fewest that free what is short, the best to go first. False: all together do not suffice.
    [[nodiscard]] bool choose(std::vector<std::size_t>& listed, const std::vector<std::int64_t>& short_by) const;

    const State& state_;
    Time now_;
    std::vector<Candidate> candidates_;
    std::vector<std::vector<std::size_t>> on_device_;  ///< candidates
    std::vector<std::int64_t> room_;
    mutable std::map<std::pair<Reach, int>, std::vector<std::int64_t>> room_within_;  ///< once computed
};

}  // namespace bulkhead::supervisor::memory

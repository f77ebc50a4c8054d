#pragma once

#include <algorithm>
#include <climits>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "tests/simulation/world.h"

namespace bulkhead::simulation {

[[nodiscard]] inline bool is_of(const std::vector<std::string>& unit, const std::string& model) {
    return std::ranges::find(unit, model) != unit.end();
}
[[nodiscard]] inline bool is_starting(const Process& one) {
    return one.state == Process::State::placed || one.state == Process::State::loading;
}
[[nodiscard]] inline bool is_going(const Process& one) {
    return one.state == Process::State::draining || one.state == Process::State::ended;
}

/// What must hold after every event whatever happened before: written from the rules of
/// docs/operations.md and the simulated machine, not from the policy's own books.
class Invariants {
public:
    Invariants(World& world, OurPolicy& ours);

    /// The first that was broken; empty: none.
    [[nodiscard]] const std::string& broken() const { return broken_; }
    /// Something else than the rules here was broken.
    void fail(const std::string& what);
    /// Another supervisor's policy from now on.
    void watch(OurPolicy& ours);
    bool paused = false;  ///< while a new supervisor adopts

    /// The ledger's figures, from what processes hold.
    [[nodiscard]] std::vector<DeviceLedger> shadow() const;

private:
    struct Victim {  ///< what goes together
        std::vector<ReplicaId> members;
        int priority = 0;
        bool pinned = false;
        bool preload = false;
        bool starting = false;
        bool in_use = false;
        bool busy = false;
        Time protected_until{};
        Time turn_until{};              ///< at least
        Time turn_over{};               ///< at most
        int lent_until_turn = INT_MIN;  ///< priority of a long wait, while its turn lasts at least
        int lent_until_over = INT_MIN;  ///< the same, while its turn lasts at most
    };
    /// Since when a model, or the others of its together group, have waited.
    struct Since {
        Ticket ticket = 0;
        Time when{};
    };
    struct Piece {
        std::string model;
        std::map<DeviceId, Need> needs;  ///< of its devices
        [[nodiscard]] const Need& need(const DeviceId& device) const { return needs.at(device); }
        [[nodiscard]] bool takes_host_memory_beside() const {
            return std::ranges::any_of(needs, [](const auto& one) { return one.second.host > 0; });
        }
    };
    void check(const Event& event, const Actions& actions);
    void note_who_waits(const Event& event);
    void note_lent();
    void check_ledger();
    void check_use(const Event& event);
    void check_thrash(const Event& event, const Actions& actions);
    void check_limits();
    void check_grants(const Actions& actions);
    void check_groups(const Actions& actions);
    void check_evictions(const Event& event, const Actions& actions);
    void check_refusals(const Actions& actions);
    void check_exclusive();
    void check_parted(const action::Evict& evict, const Victim& victim);
    void check_preload(const std::string& model, const std::vector<std::string>& unit,
                       const std::vector<Piece>& pieces, const Actions& actions);
    void check_nobody_waits_in_vain();
    void check_deadlines(const Event& event);
    /// What loads and ends as one.
    [[nodiscard]] std::vector<std::string> unit_of(const std::string& model) const;
    /// Whether it is declared as a member of a together group.
    [[nodiscard]] bool is_together(const std::string& model) const;
    [[nodiscard]] std::uint32_t minimum_of(const std::string& model) const;
    /// They are different members of one exclusive group.
    [[nodiscard]] bool exclude_each_other(const std::string& a, const std::string& b) const;
    /// Whether somebody waits for any of it.
    [[nodiscard]] bool is_asked_for(const std::vector<std::string>& unit) const;
    [[nodiscard]] int priority_of(const std::vector<std::string>& unit) const;
    [[nodiscard]] std::optional<Since> since(const std::vector<std::string>& unit) const;
    /// Only preloads wait for it.
    [[nodiscard]] bool is_preload(const std::vector<std::string>& unit) const;
    /// Whether any of it loads or has a place.
    [[nodiscard]] bool is_loading(const std::vector<std::string>& unit) const;
    /// A preload waits for what loads for other preloads.
    [[nodiscard]] bool is_preloading_beside(const std::vector<std::string>& unit) const;
    /// With what a long wait adds; of a preload below all.
    [[nodiscard]] int rank_of(const std::vector<std::string>& unit) const;
    [[nodiscard]] std::vector<Victim> victims() const;
    [[nodiscard]] Victim victim_of(const std::vector<ReplicaId>& members) const;
    [[nodiscard]] Piece piece_of(const std::string& model) const;
    [[nodiscard]] bool is_unknown(const Piece& piece) const;
    [[nodiscard]] std::vector<Piece> missing(const std::vector<std::string>& unit, bool& ending) const;
    /// Whether some way to place them exists, if whoever `may_go` does, on devices that
    /// are not `closed`.
    /// `once_ready`  and loads of unknown size are over
    [[nodiscard]] bool fits(const std::vector<Piece>& pieces, const std::vector<std::string>& unit,
                            const std::function<bool(const Victim&)>& may_go, const std::vector<DeviceId>& closed,
                            bool once_ready = false) const;
    [[nodiscard]] std::int64_t room(const DeviceId& device) const;
    [[nodiscard]] bool is_lone_load_placed() const;
    [[nodiscard]] Bytes held(const ReplicaId& who, const DeviceId& device) const;
    /// What its end frees there, for others: also what it was to get.
    [[nodiscard]] Bytes freed(const ReplicaId& who, const DeviceId& device) const;

    World& world_;
    OurPolicy* ours_;
    std::map<std::string, Since> since_;
    std::set<std::string> asked_;  ///< models that somebody waits for
    std::map<ReplicaId, int> lent_;
    struct Bound {
        Time deadline{};
        bool for_room = false;
    };
    std::map<Ticket, Bound> bounds_;  ///< of those who gave a deadline
    std::vector<DeviceLedger> ledger_;  ///< after the present event
    std::vector<Holding> holdings_;     ///< after the event before
    /// The present event reports more memory than its process was held to have.
    bool measured_more_ = false;
    std::set<ReplicaId> places_;        ///< that got one since somebody waits for them
    std::set<ReplicaId> went_;          ///< for others, and their process has not ended yet
    std::string broken_;
};

}  // namespace bulkhead::simulation

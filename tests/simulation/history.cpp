#include "tests/simulation/history.h"

#include <algorithm>
#include <climits>

#include <fmt/format.h>

#include "supervisor/memory/limits.h"
#include "tests/simulation/invariants/invariants.h"
#include "tests/simulation/story.h"

namespace bulkhead::simulation {
namespace {

constexpr Bytes gib = Bytes{1} << 30;

class Life {
public:
    Life(std::uint64_t seed, int steps, std::vector<std::string>* story)
        : steps_{steps}, world_{std::make_unique<OurPolicy>(), seed}, invariants_{world_, ours()} {
        const auto count_events = world_.check;
        world_.check = [this, count_events, story](const Event& event, const Actions& actions) {
            ++history_.events;
            if (story != nullptr) tell(*story, event, actions);
            count_events(event, actions);
        };
        world_.answered = [this](Ticket /*ticket*/, const Action& /*answer*/) { ++history_.answered; };
    }

    History run() {
        make_machine();
        make_fleet();
        for (int i = 0; i < steps_ && invariants_.broken().empty(); ++i) {
            step();
            world_.run_until(world_.now + (one_in(8) ? Millis{below(90'000)} : Millis{below(1'500)}));
        }
        // The machine stays as it is now; everybody is answered, the first of them in bounded time.
        check_bound();
        const bool ended = world_.run_out(world_.now + std::chrono::hours{24});
        history_.broken = invariants_.broken();
        if (history_.broken.empty() && !ended)
            history_.broken =
                fmt::format("{} tickets and {} requests are never answered; why: {}", world_.tickets.size(),
                            world_.requests.size(), world_.tickets.empty() ? "" : why(world_.tickets.begin()->second));
        history_.loads = world_.loads;
        history_.evictions = world_.evictions;
        return history_;
    }

private:
    [[nodiscard]] OurPolicy& ours() { return static_cast<OurPolicy&>(world_.decider()); }
    [[nodiscard]] std::string why(const std::string& model) { return ours().policy.why(model, world_.now); }
    int below(int bound) { return static_cast<int>(world_.random() % static_cast<std::uint64_t>(bound)); }
    bool one_in(int count) { return below(count) == 0; }
    Bytes some_bytes(Bytes most) { return most / 64 * (1 + world_.random() % 64); }

    void tell(std::vector<std::string>& story, const Event& event, const Actions& actions) {
        story.push_back(fmt::format("{:9} ms  {}", (world_.now.time_since_epoch() - std::chrono::hours{1}) / Millis{1},
                                    text_of(event)));
        for (const Action& action : actions) story.push_back("              " + text_of(action));
    }

    void make_machine() {
        gpus_ = below(4);
        invariants_.paused = true;
        world_.add_device(DeviceId{host}, 32 * gib);
        for (int i = 0; i < gpus_; ++i)
            world_.add_device(fmt::format("GPU-{}", i), gib * static_cast<Bytes>(4 + 4 * below(5)), one_in(2) ? "A" : "");
        invariants_.paused = false;
        if (one_in(4)) world_.load_crashes = below(20);
        if (one_in(4)) world_.load_runs_out = below(20);
        if (one_in(4)) world_.crash_quarantines = below(60);
        if (one_in(4)) world_.receipt_unverified = below(60);
        world_.crash_restarts = 50;
        world_.for_room_every = 3;
    }

    [[nodiscard]] DeviceLimit some_limit() {
        return {one_in(3) ? 40 + below(61) : 100, one_in(3) ? some_bytes(gib) : 0};
    }

    [[nodiscard]] Declaration some_model(int number) {
        Declaration one;
        one.model = one.key = fmt::format("m{}", number);
        Truth& real = world_.truth[one.model];
        if (real.at_ready == 0) {
            real.at_ready = some_bytes(10 * gib);
            real.load_peak = real.at_ready + (one_in(2) ? some_bytes(gib) : 0);
            real.serving_peak = real.at_ready + some_bytes(gib);
            real.load = Millis{50 + below(one_in(10) ? 30'000 : 4'000)};
            real.reclaim = Millis{5 + below(300)};
        }
        if (gpus_ == 0 || one_in(5)) {
            one.devices = {DeviceId{host}};
            real.host = 0;
        } else {
            for (int i = 0; i < gpus_; ++i)
                if (one.devices.empty() || !one_in(3)) one.devices.push_back(fmt::format("GPU-{}", i));
            if (one_in(4)) one.devices.emplace_back(host);
            if (one_in(3)) real.host = some_bytes(4 * gib);
        }
        if (!one_in(4)) one.memory = one_in(10) ? some_bytes(60 * gib) : real.load_peak + some_bytes(gib / 4);
        if (one_in(4)) one.package = Estimate{real.at_ready, real.at_ready / 2};
        one.priority = one_in(2) ? 0 : below(3);
        one.pin = one_in(12);
        one.preload = one_in(4);
        if (one_in(3)) one.keep_alive = Millis{one_in(3) ? 0 : below(60'000)};
        if (one_in(3)) one.min_resident = Millis{below(20'000)};
        if (one_in(3))
            one.group = Group{fmt::format("g{}", below(2)), GroupKind::exclusive};
        else if (one_in(5))
            one.group = Group{"pair", GroupKind::together};
        if (one_in(5)) one.replicas_max = 1 + static_cast<std::uint32_t>(below(3));
        if (one_in(8)) one.replicas_min = std::min(one.replicas_max, 2U);
        if (one_in(16)) {  // many, and small enough that some machines have room for all
            one.replicas_min = one.replicas_max = 2 + static_cast<std::uint32_t>(below(7));
            if (one.memory) one.memory = some_bytes(2 * gib);
        }
        one.drain = Millis{500 + below(5'000)};
        return one;
    }

    void make_fleet() {
        const int models = 1 + below(8);
        std::vector<Declaration> declared;
        for (int i = 0; i < models; ++i) declared.push_back(some_model(i));
        if (one_in(20))
            for (Declaration& one : declared) one.pin = true;
        std::map<DeviceId, DeviceLimit> limits{{DeviceId{host}, some_limit()}};
        for (int i = 0; i < gpus_; ++i) limits[fmt::format("GPU-{}", i)] = some_limit();
        reload(std::move(declared), std::move(limits));
    }

    /// Several, in an order, as at a start.
    void preload() {
        for (const auto& [name, one] : world_.declared)
            if (one.preload || one_in(8)) (void)world_.load(name, Asker::preload, some_deadline());
    }

    [[nodiscard]] std::vector<std::string> group_of(const std::string& model) const {
        std::vector<std::string> all;
        const auto& group = world_.declared.at(model).group;
        if (group && group->kind == GroupKind::together)
            for (const auto& [name, one] : world_.declared)
                if (one.group == group) all.push_back(name);
        return all;
    }

    /// Workers of models that are gone are ended, and new together groups completed, as the live
    /// supervisor does.
    void reload(std::vector<Declaration> declared, std::map<DeviceId, DeviceLimit> limits) {
        std::map<std::string, std::vector<std::string>> former;
        for (const auto& [name, one] : world_.declared) former[name] = group_of(name);
        world_.declare(std::move(declared), std::move(limits));
        for (const auto& [name, one] : world_.declared) {
            const auto process = world_.processes.find({name, 0});
            const auto group = group_of(name);
            const bool lives = process != world_.processes.end() && (process->second.state == Process::State::ready ||
                                                                     process->second.state == Process::State::loading);
            if (lives && !group.empty() && group != former[name])
                (void)world_.load(name, Asker::person, some_deadline());
        }
        std::vector<ReplicaId> gone;
        for (const auto& [who, one] : world_.processes) {
            const auto known = world_.declared.find(who.model);
            if (known == world_.declared.end() || who.replica >= known->second.replicas_max) gone.push_back(who);
        }
        for (const ReplicaId& who : gone) {
            world_.unload(who);
            world_.crash(who, false);
        }
    }

    [[nodiscard]] std::string some_name() {
        auto one = world_.declared.begin();
        std::advance(one, below(static_cast<int>(world_.declared.size())));
        return one->first;
    }
    [[nodiscard]] std::optional<ReplicaId> some_worker() {
        if (world_.processes.empty()) return std::nullopt;
        auto one = world_.processes.begin();
        std::advance(one, below(static_cast<int>(world_.processes.size())));
        return one->first;
    }
    [[nodiscard]] DeviceId some_device() {
        auto one = world_.machines.begin();
        std::advance(one, below(static_cast<int>(world_.machines.size())));
        return one->first;
    }
    [[nodiscard]] std::optional<Millis> some_deadline() {
        return one_in(3) ? std::nullopt : std::optional{Millis{1 + below(one_in(2) ? 3'000 : 120'000)}};
    }

    void step() {
        switch (below(26)) {
        case 0:
        case 1:
        case 2: return planned_load();
        case 3: return (void)world_.load(some_name(), Asker::restart, some_deadline());
        case 4: return clients_come_and_go();
        case 5:
            if (const auto who = some_worker()) world_.unload(*who);
            return;
        case 6:
            if (const auto who = some_worker()) world_.crash(*who, one_in(3));
            return;
        case 7:
            if (const auto who = some_worker()) world_.grow(*who);
            return;
        case 8:
        case 9: {
            const DeviceId id = some_device();
            return world_.set_foreign(id, one_in(2) ? 0 : some_bytes(world_.machines.at(id).total / 2));
        }
        case 10: return make_fleet();
        case 11:
            if (gpus_ > 0 && one_in(3)) {
                const DeviceId id = fmt::format("GPU-{}", below(gpus_));
                world_.lose_device(id, !world_.machines.at(id).lost);
            }
            return;
        case 12: return world_.pin(some_name(), one_in(2));
        case 13: return (void)world_.reclaim(some_device(), some_bytes(8 * gib));
        case 14: return new_supervisor();
        case 15:
            if (const auto who = some_worker(); who && one_in(2)) world_.run_out(*who);
            return;
        case 16: return preload();
        default: return ask();
        }
    }

    void ask() {
        const Time asked = world_.now;
        const auto model = some_name();
        for (int i = 1 + below(one_in(5) ? 12 : 2); i > 0; --i)
            (void)world_.request(model, Millis{1 + below(one_in(6) ? 20'000 : 300)}, some_deadline(),
                                 [this, asked](World& world, const World::Request&, Outcome) {
                                     ++history_.answered;
                                     const auto waited = std::chrono::duration_cast<Millis>(world.now - asked).count();
                                     history_.longest_wait_ms =
                                         std::max<std::int64_t>(history_.longest_wait_ms, waited);
                                 });
    }

    void clients_come_and_go() {
        std::vector<Ticket> waiting;
        for (const auto& [ticket, model] : world_.tickets)
            if (one_in(2)) waiting.push_back(ticket);
        for (const Ticket one : waiting) world_.leave(one);
    }

    [[nodiscard]] int priority_of(const std::string& model) const {
        const Declaration& one = world_.declared.at(model);
        int priority = one.priority;
        if (one.group && one.group->kind == GroupKind::together)
            for (const auto& [name, other] : world_.declared)
                if (other.group == one.group) priority = std::max(priority, other.priority);
        return priority;
    }
    [[nodiscard]] bool is_measured(const std::string& model) {
        return std::ranges::all_of(world_.declared.at(model).devices, [&](const DeviceId& id) {
            return ours().policy.need(model, id).basis != Basis::unknown;
        });
    }

    /// Nobody waits longer than until each model has had its turn, those of a lower priority
    /// `limits::patience` more, while models of the highest priority are asked for again and again.
    /// (One of unknown size waits until all others are idle.)
    void check_bound() {
        if (!invariants_.broken().empty()) return;
        int highest = INT_MIN;
        Millis bound = std::chrono::duration_cast<Millis>(limits::promise_for + limits::patience) +
                       Millis{60'000};  // of a reclaim
        for (const auto& [name, one] : world_.declared) {
            highest = std::max(highest, priority_of(name));
            const Truth& real = world_.truth.at(name);
            const Millis swap = real.load + std::max(real.reclaim, Millis{limits::reclaim_time_unknown});
            bound += std::min(swap * limits::turn_per_swap, Millis{limits::turn_max}) + 2 * swap + one.min_resident +
                     one.drain + Millis{limits::gap_max};
        }
        std::vector<std::string> high;
        for (const auto& [name, one] : world_.declared)
            if (priority_of(name) == highest && is_measured(name)) high.push_back(name);
        std::vector<Ticket> first;
        for (const auto& [ticket, model] : world_.tickets)
            if (world_.declared.contains(model) && is_measured(model)) first.push_back(ticket);
        const auto waits = [&](Ticket ticket) { return world_.tickets.contains(ticket); };
        constexpr int arrivals = 64;
        for (int i = 0; i < arrivals && std::ranges::any_of(first, waits) && !world_.stopped; ++i) {
            if (!high.empty())
                (void)world_.request(high[static_cast<std::size_t>(below(static_cast<int>(high.size())))],
                                     2 * bound / arrivals, std::nullopt);
            world_.run_until(world_.now + bound / arrivals);
        }
        for (const Ticket ticket : first)
            if (waits(ticket))
                return fail(fmt::format("ticket {} for {} waits for more than {} s; why: {}", ticket,
                                        world_.tickets.at(ticket), bound.count() / 1'000,
                                        why(world_.tickets.at(ticket))));
        history_.waited_first += first.size();
    }

    /// What `plan` says is what a load does.
    void planned_load() {
        const std::string model = some_name();
        const Plan plan = ours().policy.plan(model, world_.now);
        if (why(model).empty()) return fail("`why` is silent");
        Actions actions;
        const auto former = world_.check;
        bool first = true;
        bool placed = false;
        bool withdrawn = false;
        world_.check = [&](const Event& event, const Actions& all) {
            if (std::holds_alternative<event::LoadAsked>(event) && std::exchange(first, false)) {
                actions = all;
                placed = !world_.placed.empty();
                withdrawn = world_.withdrew;
            }
            former(event, all);
        };
        // A person's load lifts the quarantine of its own model only.
        const bool others_wait = !world_.tickets.empty() || std::ranges::any_of(world_.quarantined, [&](const auto& who) {
            return who.model != model;
        });
        (void)world_.load(model, Asker::person, some_deadline());
        world_.check = former;
        if (others_wait) return;
        std::vector<ReplicaId> planned = plan.victims;
        std::vector<ReplicaId> evicted;
        bool refused = false;
        for (const Action& action : actions) {
            if (const auto* evict = std::get_if<action::Evict>(&action)) {
                if (evict->cause == EvictCause::room) evicted.push_back(evict->who);
                // Just then its time beside another of its group was over: it goes for that one,
                // and its room may be enough.
                if (evict->cause == EvictCause::group) return;
            }
            refused = refused || std::holds_alternative<action::Refuse>(action);
        }
        std::ranges::sort(planned);
        std::ranges::sort(evicted);
        using Would = Plan::Outcome;
        if (withdrawn) return;
        if (plan.outcome == Would::evicts && planned != evicted)
            return fail("plan names others than were evicted for " + model);
        if ((plan.outcome == Would::fits || plan.outcome == Would::evicts) && !placed)
            return fail("plan says it starts: " + model);
        if (plan.outcome == Would::fits && !evicted.empty()) return fail("plan says nobody goes for " + model);
        if (plan.outcome == Would::refused && !refused) return fail("plan says it is refused: " + model);
        if (plan.outcome == Would::waits && (placed || refused))
            return fail("plan says it waits: " + model + ": " + plan.why);
    }

    /// SIGKILL: the next one knows what processes hold, and nothing else.
    void new_supervisor() {
        const auto before = invariants_.shadow();
        auto holdings = world_.holdings();
        auto next = std::make_unique<OurPolicy>(Footprints::from_json(ours().policy.footprints().to_json()));
        if (!(next->policy.footprints() == ours().policy.footprints())) return fail("footprints differ when read back");
        OurPolicy& now = *next;
        invariants_.paused = true;
        const auto compare = [&] {
            auto after = now.policy.ledger();
            for (const DeviceLedger& mine : before) {  // a promise ends with the
                                                       // supervisor that gave it
                const auto found = std::ranges::find(after, mine.id, &DeviceLedger::id);
                if (found == after.end() || !(*found == mine)) return fail("the next supervisor's ledger differs");
            }
            auto adopted = now.policy.holdings();
            // It may unload what is due.
            for (std::size_t i = 0; i < adopted.size() && i < holdings.size(); ++i)
                holdings[i].draining = holdings[i].draining || adopted[i].draining;
            if (adopted != holdings) return fail("the next supervisor's holdings differ");
        };
        // Pins by hand end with the supervisor.
        for (const auto& [name, one] : world_.declared) world_.pinned[name] = one.pin;
        world_.replace(std::move(next), holdings, compare);
        invariants_.watch(now);
        invariants_.paused = false;
    }

    void fail(const std::string& what) { invariants_.fail(what); }

    int steps_;
    int gpus_ = 0;
    History history_;
    World world_;
    Invariants invariants_;
};

}  // namespace

History live(std::uint64_t seed, int steps, std::vector<std::string>* story) { return Life{seed, steps, story}.run(); }

}  // namespace bulkhead::simulation

#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <queue>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "supervisor/memory/limits.h"
#include "supervisor/memory/policy.h"
#include "tests/simulation/placed.h"

namespace bulkhead::simulation {

using namespace supervisor::memory;

/// Who decides: our policy, or one it is compared with. Sees what a supervisor sees.
class Decider {
public:
    virtual ~Decider() = default;
    virtual Actions on(const Event& event, Time now) = 0;
    [[nodiscard]] virtual std::optional<Time> next_tick() const { return std::nullopt; }
    [[nodiscard]] virtual std::vector<Holding> placed() const { return {}; }
    /// What a load is planned to take.
    [[nodiscard]] virtual Bytes planned(const std::string& /*model*/, const DeviceId& /*device*/) const {
        return limits::bytes_max;
    }
    /// What ready workers are to get beside what they hold.
    [[nodiscard]] virtual std::map<ReplicaId, Bytes> growing() const { return {}; }
};

class OurPolicy : public Decider {
public:
    explicit OurPolicy(Footprints known = {}) : policy{std::move(known)} {}
    Actions on(const Event& event, Time now) override { return policy.on(event, now); }
    [[nodiscard]] std::optional<Time> next_tick() const override { return policy.next_tick(); }
    [[nodiscard]] std::vector<Holding> placed() const override { return simulation::placed(policy); }
    [[nodiscard]] Bytes planned(const std::string& model, const DeviceId& device) const override {
        return policy.need(model, device).device;
    }
    [[nodiscard]] std::map<ReplicaId, Bytes> growing() const override { return simulation::growing(policy); }
    Policy policy;
};

/// What a model of the simulated machine is in truth, whatever is declared of it.
struct Truth {
    Bytes at_ready = 0;
    Bytes load_peak = 0;
    Bytes serving_peak = 0;
    Bytes host = 0;  ///< beside its GPU
    Millis load{1'000};
    Millis reclaim{100};
};

/// A simulated worker's process.
struct Process {
    enum class State : std::uint8_t { placed, loading, ready, draining, ended };
    State state{};
    std::uint64_t generation = 0;
    DeviceId device;
    Bytes device_bytes = 0;  ///< that it is to get, has reserved, or holds
    Bytes host_bytes = 0;
    Bytes grows = 0;       ///< that it is to get beside, for a request that ran out; of one that
                           ///< drains: was to get
    bool ran_out = false;  ///< had such a request
    Time ready_at{};
    Time idle_since{};
    Bytes peak_before = 0;  ///< what the model was known to serve with when this
                            ///< process became ready
    bool used = false;
    bool alone = false;                   ///< loads with all that is free, since its
                                          ///< size is not known
    bool estimated = false;               ///< ready, and not measured while it served
    std::vector<std::uint64_t> requests;  ///< accepted, the first one runs
    std::uint32_t channels = 0;           ///< open
    struct Told {                         ///< what its decider was told about it
        bool ready = false;
        std::uint32_t in_flight = 0;
        std::uint32_t channels = 0;
        bool is_adopted = false;  ///< and nothing of its requests since
        Time awaited_until{};     ///< a request, after one that ran out
    } told;
    Time drain_until = Time::max();
};

/// What became of a request or a load.
enum class Outcome : std::uint8_t { served, refused, failed };

/// Devices, processes and clients that carry out what a decider says, on a clock of their own.
class World {
public:
    struct Request {
        std::string model;
        Millis service{0};
        Time asked{};
        Time began{};
        bool was_ready = false;  ///< at its arrival
        std::optional<Time> deadline;
        std::function<void(World&, const Request&, Outcome)> done;
        Ticket ticket = 0;  ///< while it waits for its model
    };

    World(std::unique_ptr<Decider> decider, std::uint64_t seed);

    // --- the machine
    void declare(std::vector<Declaration> models, std::map<DeviceId, DeviceLimit> limits);
    void add_device(const DeviceId& id, Bytes total, const std::string& kind = {});
    void set_foreign(const DeviceId& id, Bytes bytes);
    void lose_device(const DeviceId& id, bool lost);
    std::map<std::string, Truth> truth;

    // --- what people and clients do
    /// Asks for the model, then for an answer that takes `service` of a worker's time.
    std::uint64_t request(const std::string& model, Millis service, std::optional<Millis> deadline,
                          std::function<void(World&, const Request&, Outcome)> done = {});
    Ticket load(const std::string& model, Asker asker, std::optional<Millis> deadline);
    void leave(Ticket ticket);
    void unload(const ReplicaId& who);
    void pin(const std::string& model, bool pinned);
    /// A worker serves more than ever: its peak is measured.
    void grow(const ReplicaId& who);
    /// A request of it fails for want of memory, and the worker goes on.
    void run_out(const ReplicaId& who);
    void crash(const ReplicaId& who, bool out_of_memory);
    Ticket reclaim(const DeviceId& device, Bytes bytes);
    void send(Event event);
    void at(Time when, std::function<void(World&)> what);
    void after(Millis wait, std::function<void(World&)> what) { at(now + wait, std::move(what)); }

    // --- its clock
    /// Everything that happens until then.
    void run_until(Time when);
    /// Until every ticket and request is answered. False: by `limit` some are not.
    bool run_out(Time limit);
    bool stopped = false;  ///< nothing further happens
    Time now{std::chrono::hours{1}};

    // --- what can be seen
    std::map<ReplicaId, Process> processes;
    std::map<Ticket, std::string> tickets;  ///< unanswered, by model; "" of a reclaim
    /// By model, of those that asked this supervisor again.
    std::map<std::string, Ticket> refused_at_once;
    std::map<Ticket, Asker> askers;
    std::map<std::uint64_t, Request> requests;  ///< unanswered
    std::map<std::string, Declaration> declared;
    std::map<DeviceId, DeviceLimit> limits;
    struct Machine {
        Bytes total = 0;
        Bytes foreign = 0;
        bool lost = false;
        std::string kind{};
    };
    std::map<DeviceId, Machine> machines;
    std::map<std::string, Bytes> served_peak;  ///< by key of a footprint
    [[nodiscard]] std::string key_of(const std::string& model, const DeviceId& device) const;
    std::map<std::string, bool> pinned;
    std::set<ReplicaId> quarantined;
    std::set<std::pair<ReplicaId, DeviceId>> placed;  ///< who got a place by the last event
    bool withdrew = false;  ///< by the last event, one lost its place before its grant
    std::string misdealt;  ///< a request that another replica with less to do should have got
    std::uint64_t events = 0;
    std::uint64_t loads = 0;
    std::uint64_t evictions = 0;
    std::mt19937_64 random;

    /// Chance, in percent, that a load crashes, or runs out of memory.
    int load_crashes = 0;
    int load_runs_out = 0;
    /// Chance, in percent, that another process follows a crash by itself, that the replica is
    /// quarantined after it, and that an ended process' memory is not back but held by another
    /// program for a while.
    int crash_restarts = 0;
    int crash_quarantines = 0;
    int receipt_unverified = 0;
    /// One of so many deadlines bounds only the wait for room; 0: none does.
    std::uint64_t for_room_every = 0;
    /// Called after every event, with the actions it led to.
    std::function<void(const Event&, const Actions&)> check;
    /// The answer to a load or a reclaim that does not belong to a request.
    std::function<void(Ticket, const Action&)> answered;

    /// What each process holds.
    [[nodiscard]] std::vector<Holding> holdings() const;
    /// A new supervisor: its decider is told what the former one's processes hold. `adopted` is
    /// called before whoever waits asks again.
    void replace(std::unique_ptr<Decider> decider, const std::vector<Holding>& holdings,
                 const std::function<void()>& adopted);
    [[nodiscard]] Decider& decider() { return *decider_; }

private:
    struct Timed {
        Time when;
        std::uint64_t number;
        std::function<void(World&)> what;
        bool operator>(const Timed& other) const { return std::tie(when, number) > std::tie(other.when, other.number); }
    };
    [[nodiscard]] Millis millis_since(Time when) const { return std::chrono::duration_cast<Millis>(now - when); }
    void pump();
    [[nodiscard]] bool is_for_room(Ticket ticket) const {
        return for_room_every != 0 && ticket % for_room_every == 0;
    }
    void take_placements(const Actions& actions);
    void take_growth();
    void do_one(const action::Grant& grant);
    void do_one(const action::Grow& grow) { processes.at(grow.who).device_bytes = grow.device_bytes; }
    void do_one(const action::Evict& evict);
    void do_one(const action::Serve& serve);
    void do_one(const action::Refuse& refuse);
    void do_one(const action::Queued& queued) { (void)queued; }
    void do_one(const action::Reclaimed& reclaimed);
    void become_ready(const ReplicaId& who);
    void note_told(const Event& event);
    void close_channel(const ReplicaId& who, std::uint64_t generation);
    [[nodiscard]] bool happens(int percent) { return percent > 0 && static_cast<int>(random() % 100) < percent; }
    void quarantine(const ReplicaId& who, bool is_quarantined);
    void refuse_if_quarantined(const std::string& model);
    void hold_for_a_while(const DeviceId& id, Bytes bytes);
    void end(const ReplicaId& who, bool out_of_memory);
    void ask(std::uint64_t id);
    void begin_next(const ReplicaId& who);
    void finish(const ReplicaId& who, std::uint64_t generation, std::uint64_t id);
    void answer(std::uint64_t id, Outcome outcome);
    [[nodiscard]] Process* find(const ReplicaId& who, std::uint64_t generation);

    std::unique_ptr<Decider> decider_;
    std::priority_queue<Timed, std::vector<Timed>, std::greater<>> timed_;
    std::deque<Event> to_send_;
    bool sending_ = false;
    std::uint64_t number_ = 0;
    std::map<Ticket, std::uint64_t> request_of_;
    std::set<Ticket> refused_;  ///< of whom the policy has yet to hear that they left
};

}  // namespace bulkhead::simulation

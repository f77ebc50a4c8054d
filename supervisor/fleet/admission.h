#pragma once

#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "config/fleet.h"
#include "supervisor/base/deadline.h"
#include "supervisor/fleet/blanks.h"
#include "supervisor/fleet/file_facts.h"
#include "supervisor/fleet/footprint_file.h"
#include "supervisor/memory/policy.h"
#include "supervisor/replica/replica.h"

namespace bulkhead::supervisor {

/// Carries out what the memory policy decides: starts replicas when there is room for them, ends others to make room,
/// and answers who waits. It plans the models whose devices have a limit, and those that say something that only it can
/// obey (`keep_alive`, `group`, a range of replicas, a list of devices); all others start when they are asked to.
///
/// Thread  the loop; what follows from a call is done later
class Admission final : public MemoryGate {
public:
    using Ticket = memory::Ticket;
    using OnServed = std::function<void(Result<Replica*>)>;
    using FindReplica = std::function<Replica*(const std::string& model, std::uint32_t replica)>;
    /// What a client is told that asked for room.
    struct MadeRoom {
        std::uint64_t freed = 0;
        std::vector<Receipt> receipts;
        std::string short_of;  ///< why not all of it; empty: all is there
    };

    Admission(FleetContext& context, Blanks& blanks, FindReplica find);
    ~Admission() override;
    Admission(const Admission&) = delete;
    Admission& operator=(const Admission&) = delete;

    /// What only a look at disks and drivers tells.
    struct Known {
        std::vector<Gpu> gpus{};
        memory::Footprints footprints{};
        std::map<std::string, FileFacts> files{};   ///< by model
        std::map<std::string, std::string> keys{};  ///< of footprints, by model
    };
    /// Whether `begin` must know the GPUs: asking for them wakes the driver.
    [[nodiscard]] static bool needs_gpus(const config::Fleet& fleet);
    /// Once, before anything else is asked.
    /// `fleet`  outlives this
    /// `file`   empty: nothing is written to disk
    void begin(const config::Fleet& fleet, std::optional<FootprintFile> file, Known known);
    /// A former supervisor's process, before its replica is told of it.
    void adopt(const FoundWorker& found, const std::optional<ReplicaRecord>& record);

    [[nodiscard]] bool plans(const std::string& model) const { return planned_.contains(model); }
    /// That a planned model may run on.
    [[nodiscard]] std::vector<Device> gpus_of(const config::ModelSpec& spec) const;
    /// Answered once: by a replica that serves, or why there is none.
    /// `deadline`     empty: only the wait for room is bounded; of a restart nothing is
    /// `room_within`  empty: as long as a load may take, and `limits::room_wait_max`
    Ticket ask(const std::string& model, memory::Asker asker, std::string client,
               std::optional<std::chrono::milliseconds> deadline, OnServed served,
               std::optional<std::chrono::milliseconds> room_within = {});
    /// Who asked for a model or for room is gone.
    void leave(Ticket ticket);
    /// Who waits for this model is answered; all of them with an empty name.
    void refuse(const std::string& model, const Error& error);
    [[nodiscard]] bool is_evicting(const Replica& replica) const { return evicting_.contains(id_of(replica)); }
    void pin(const std::string& model, bool pinned);
    /// Tells the blanks what is free for them.
    void fit_blanks();
    /// Returns  for `leave`; 0 where it was answered at once
    Ticket make_room(const std::string& device, std::uint64_t bytes, std::string client,
                     std::optional<std::chrono::milliseconds> deadline, std::function<void(Result<MadeRoom>)> made);

    /// What a load would do: an answer to `fleet.plan`.
    [[nodiscard]] json::object plan(const std::string& model) const;
    /// Sentences for `why`; empty for a model that is not planned.
    [[nodiscard]] std::string why(const std::string& model) const;
    /// What is known of its memory, where it runs or else may run first: members `estimated` and `measured`.
    [[nodiscard]] json::object footprint(const Replica& replica) const;
    /// What becomes of a replica, for its row: members `pinned`, `waiting`, `unload_at`.
    void add_outlook(const Replica& replica, json::object& row) const;
    [[nodiscard]] json::array ledger() const;

    // MemoryGate
    [[nodiscard]] bool may_start(Replica& replica) override;
    void changed(Replica& replica, WorkerState from, WorkerState to) override;
    void measured(Replica& replica) override;
    void counted(Replica& replica) override;
    void channels_changed(Replica& replica) override;
    [[nodiscard]] std::optional<HeldMemory> held(const Replica& replica) const override;
    void reclaimed(Replica& replica) override;
    [[nodiscard]] std::optional<std::uint64_t> bound(const Replica& replica) const override;

private:
    struct Waiter {
        std::string model;
        OnServed served;
        bool was_queued = false;  ///< its place was published
    };
    struct KnownDevice {
        std::string text;  ///< "cpu", "cuda:0"
        std::uint64_t total = 0;
        bool limited = false;
        bool was_seen = false;  ///< what others use of it is known
    };

    [[nodiscard]] static memory::ReplicaId id_of(const Replica& replica);
    [[nodiscard]] std::vector<memory::DeviceId> devices_of(const config::ModelSpec& spec) const;
    [[nodiscard]] std::string key_of(const std::string& model) const;
    /// Null: it was never measured on such a device.
    [[nodiscard]] const memory::Footprint* footprint_of(const std::string& model, bool on_gpu) const {
        return policy_->footprints().find(memory::footprint_key(key_of(model), on_gpu));
    }
    [[nodiscard]] bool serves(const std::string& model) const;
    /// Whoever watches the queue hears that this one is not in it any more.
    void tell_it_left(Ticket ticket, const Waiter& waiter, std::string_view how);
    void tell(memory::Event event);
    void work();
    void act(const memory::action::Place&) {}  // its process is started with the grant
    void act(const memory::action::Withdraw& withdraw);
    void act(const memory::action::Grant& grant);
    void act(const memory::action::Evict& evict);
    void act(const memory::action::Serve& serve);
    void act(const memory::action::Refuse& refuse);
    void act(const memory::action::Queued& queued);
    void act(const memory::action::Reclaimed& reclaimed);
    void tell_ready(const Replica& replica, std::optional<memory::Footprint> measured);
    void could_not_start(const memory::ReplicaId& who, const Error& error);
    void look(std::function<void()> looked);
    void lose_workers_on(const Gpu& gpu);
    void watch_others();
    void save();

    FleetContext& context_;
    Blanks& blanks_;
    FindReplica find_;
    std::unique_ptr<memory::Policy> policy_ = std::make_unique<memory::Policy>();
    std::optional<FootprintFile> file_;
    std::map<std::string, const config::ModelSpec*> planned_;
    std::map<std::string, std::string> keys_;
    std::map<std::string, FileFacts> files_;
    std::map<memory::DeviceId, KnownDevice> devices_;
    std::deque<memory::Event> events_;
    bool works_later_ = false;
    Deadline tick_;
    Deadline next_look_;
    std::vector<std::function<void()>> look_waiters_;  ///< of the one look under way
    std::map<Ticket, Waiter> waiters_;
    std::map<Ticket, std::function<void(Result<MadeRoom>)>> room_waiters_;
    std::map<memory::ReplicaId, Receipt> receipts_;  ///< of evictions, while somebody waits for room
    Ticket last_ticket_ = 0;
    std::set<memory::ReplicaId> granted_;  ///< and not yet started
    std::set<memory::ReplicaId> evicting_;
    std::map<memory::ReplicaId, Ticket> restarts_;           ///< that wait
    std::map<memory::ReplicaId, memory::Time> ended_;        ///< without a receipt
    std::map<memory::ReplicaId, Error> failures_;            ///< of loads whose processes are still ending
    std::map<memory::ReplicaId, std::uint64_t> told_ready_;  ///< generation
    memory::Footprints saved_;
    std::shared_ptr<char> alive_ = std::make_shared<char>();
};

}  // namespace bulkhead::supervisor

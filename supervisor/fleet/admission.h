#pragma once

#include <deque>
#include <functional>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "config/fleet.h"
#include "supervisor/base/deadline.h"
#include "supervisor/fleet/blanks.h"
#include "supervisor/fleet/file_facts.h"
#include "supervisor/memory/policy.h"
#include "supervisor/replica/replica.h"

namespace bulkhead::supervisor {

/// Carries out what the memory policy decides: starts replicas when there is room, ends others to
/// make room, and answers the callers. Plans models whose devices have a limit, and models with a
/// rule only it can follow (`keep_alive`, `group`, a range of replicas, a list of devices). All
/// other models start when asked.
///
/// Thread  the loop; a call only queues its event, the consequences follow later
/// Files   admission.cpp: what is planned, asked and decided; admission_replicas.cpp: what replicas
///         say; admission_view.cpp: what people see, and what other programs use
class Admission final : public MemoryGate {
public:
    using Ticket = memory::Ticket;
    using OnServed = std::function<void(Result<Replica*>)>;
    using FindReplica = std::function<Replica*(const memory::ReplicaId&)>;
    /// The answer to a client that asked for room.
    struct MadeRoom {
        std::uint64_t freed = 0;
        std::vector<Receipt> receipts;
        std::string short_of;  ///< why not all of it was freed; empty: all was
    };

    Admission(FleetContext& context, Blanks& blanks, FindReplica find);
    ~Admission() override;
    Admission(const Admission&) = delete;
    Admission& operator=(const Admission&) = delete;

    /// What was read from disks and drivers.
    struct Known {
        std::vector<Gpu> gpus{};
        std::optional<Error> no_gpus{};  ///< why the driver did not answer
        memory::Footprints footprints{};
        std::map<std::string, FileFacts> files{};   ///< by model
        std::map<std::string, std::string> keys{};  ///< keys of the footprints, by model
    };
    /// Returns whether `begin` must know the GPUs: asking for them wakes the driver.
    [[nodiscard]] static bool needs_gpus(const config::Fleet& fleet);
    /// Call once, before anything else.
    /// `fleet`  outlives this
    /// `logs`   where measured footprints are written; empty: nowhere
    void begin(const config::Fleet& fleet, std::optional<LogStore> logs, Known known);
    /// Called when the driver lists GPUs of the fleet that it did not list before.
    std::function<void()> gpus_came;
    /// Books a former supervisor's process. Call before its replica adopts it.
    void adopt(const FoundWorker& found, const std::optional<ReplicaRecord>& record);

    [[nodiscard]] bool plans(const std::string& model) const { return planned_.contains(model); }
    /// Returns the GPUs that a planned model may run on.
    [[nodiscard]] std::vector<Device> gpus_of(const config::ModelSpec& spec) const;
    /// Asks for a replica of the model. Answered once: with a serving replica, or with the reason
    /// why there is none.
    /// `deadline`     empty: only the wait for room is bounded, and for a restart not even that
    /// `room_within`  empty: a load's deadline plus `limits::room_wait_max`
    Ticket ask(const std::string& model, memory::Asker asker, std::string client,
               std::optional<std::chrono::milliseconds> deadline, OnServed served,
               std::optional<std::chrono::milliseconds> room_within = {});
    /// The caller that asked for a model or for room has gone.
    void leave(Ticket ticket);
    /// Answers all waiters of the model with `error`; with an empty name, those of all models.
    void refuse(const std::string& model, const Error& error);
    [[nodiscard]] bool is_evicting(const Replica& replica) const { return evicting_.contains(id_of(replica)); }
    void pin(const std::string& model, bool pinned);
    /// Tells the blanks how much of each device is free for them.
    void fit_blanks();
    /// Returns  the ticket for `leave`; 0: already answered
    Ticket make_room(const std::string& device, std::uint64_t bytes, std::string client,
                     std::optional<std::chrono::milliseconds> deadline, std::function<void(Result<MadeRoom>)> made);

    /// Returns what a load would do: the answer to `fleet.plan`.
    [[nodiscard]] json::object plan(const std::string& model) const;
    /// Returns sentences for `why`; empty for a model that is not planned.
    [[nodiscard]] std::string why(const std::string& model) const;
    /// Returns members `estimated` and `measured`, for the device it runs on, else for the first
    /// it may run on.
    [[nodiscard]] json::object footprint(const Replica& replica) const;
    /// Adds what is planned for a replica to its row: members `pinned`, `waiting`, `unload_at`.
    void add_outlook(const Replica& replica, json::object& row) const;
    [[nodiscard]] json::array ledger() const;

    // MemoryGate
    [[nodiscard]] bool may_start(Replica& replica) override;
    void changed(Replica& replica, WorkerState from, WorkerState to) override;
    void measured(Replica& replica) override;
    void counted(Replica& replica) override;
    void adopted(Replica& replica) override;
    void channels_changed(Replica& replica) override;
    [[nodiscard]] std::optional<HeldMemory> held(const Replica& replica) const override;
    [[nodiscard]] std::uint64_t group(const Replica& replica) const override;
    void reclaimed(Replica& replica, const std::optional<Receipt>& receipt) override;
    [[nodiscard]] std::optional<std::uint64_t> bound(const Replica& replica) const override;

private:
    struct Waiter {
        std::string model;
        OnServed served;
        bool was_queued = false;  ///< its place in the queue was published
    };
    struct KnownDevice {
        std::string text{};  ///< "cpu", "cuda:0"
        std::uint64_t total = 0;
        bool limited = false;
        std::optional<memory::Time> seen_at{};  ///< when it was known what other programs use of it
        std::string trouble{};  ///< why its figures are old; empty: they are as of the last look
        std::string kind{memory::unnamed_gpu};  ///< of its footprints
    };
    /// What the policy knows about a process.
    struct Told {
        std::uint64_t generation = 0;
        bool ready = false;
        std::uint64_t ran_out = 0;  ///< requests that ran out of memory
        // What the allocator of a worker on a GPU said when it became ready.
        std::uint64_t beside = 0;  ///< memory of the process outside its allocator
        /// Not known of an adopted process.
        std::uint64_t peak = std::numeric_limits<std::uint64_t>::max();
    };

    [[nodiscard]] static memory::ReplicaId id_of(const Replica& replica);
    [[nodiscard]] Told& told_of(const Replica& replica);
    /// Enters GPUs that are not known yet. Returns whether there are any.
    bool learn(const std::vector<Gpu>& gpus);
    /// Tells the policy the fleet, on the devices that are known.
    void declare();
    /// A GPU that the model may run on is not known, since the driver does not tell.
    [[nodiscard]] bool lacks_gpu(const config::ModelSpec& spec) const;
    [[nodiscard]] bool has_process(const config::ModelSpec& spec) const;
    [[nodiscard]] std::vector<memory::DeviceId> devices_of(const config::ModelSpec& spec) const;
    [[nodiscard]] std::string key_of(const std::string& model) const;
    /// Empty: never measured on a device of this kind.
    [[nodiscard]] const memory::Footprint& footprint_of(const std::string& model, const memory::DeviceId& device) const;
    [[nodiscard]] bool serves(const std::string& model) const;
    void publish_queued(const std::string& model, const memory::action::Queued& queued);
    /// Publishes that the waiter has left the queue, if its place was published.
    void tell_it_left(Ticket ticket, const Waiter& waiter, std::string how);
    /// Ends the wait of a restart; null if this ticket is not one's.
    Replica* take_restart(Ticket ticket);
    void tell(memory::Event event);
    void work_later();
    /// Answers its waiters if nothing of the model serves and a person must lift a
    /// quarantine first.
    void refuse_if_quarantined(const std::string& model);
    void work();
    /// Writes what the policy counts for the replica into its record.
    void note(const memory::ReplicaId& who);
    void act(const memory::action::Grant& grant);
    void act(const memory::action::Grow& grow) { note(grow.who); }
    void act(const memory::action::Evict& evict);
    void act(const memory::action::Serve& serve);
    void act(const memory::action::Refuse& refuse);
    void act(const memory::action::Queued& queued);
    void act(const memory::action::Reclaimed& reclaimed);
    void tell_ready(const Replica& replica, std::optional<memory::Footprint> measured);
    void could_not_start(const memory::ReplicaId& who, const Error& error);
    void look(std::function<void()> looked);
    void begin_look();
    /// Says of devices that do not answer how old their figures are.
    [[nodiscard]] std::string old_figures(const config::ModelSpec& spec) const;
    /// What a look has seen of the driver.
    void note_gpus(const std::vector<Gpu>& gpus, std::optional<Error> no_gpus);
    void lose_workers_on(const Gpu& gpu);
    void watch_others();
    void save();

    FleetContext& context_;
    Blanks& blanks_;
    FindReplica find_;
    std::unique_ptr<memory::Policy> policy_ = std::make_unique<memory::Policy>();
    const config::Fleet* fleet_ = nullptr;
    std::optional<Error> no_gpus_;   ///< why the driver did not tell all GPUs at the last look
    bool searches_gpus_ = false;     ///< a planned model lacks one
    Deadline::Clock::duration search_pause_ = limits::gpu_search_first;
    std::optional<LogStore> logs_;
    std::map<std::string, const config::ModelSpec*> planned_;
    std::map<std::string, std::string> keys_;
    std::map<std::string, std::uint64_t> groups_;  ///< hashes of together groups, by model
    /// Of workers whose group a reload changed: the group before, until the load of the rest of the
    /// present one is served or refused.
    std::map<memory::ReplicaId, std::uint64_t> former_groups_;
    std::map<std::string, FileFacts> files_;
    std::map<memory::DeviceId, KnownDevice> devices_;
    std::deque<memory::Event> events_;
    bool works_later_ = false;
    Deadline tick_;
    Deadline next_look_;
    std::vector<std::function<void()>> look_waiters_;  ///< wait for the next look
    bool is_looking_ = false;
    std::map<Ticket, Waiter> waiters_;
    std::map<Ticket, std::function<void(Result<MadeRoom>)>> room_waiters_;
    std::map<memory::ReplicaId, Receipt> receipts_;  ///< while a caller waits for room
    Ticket last_ticket_ = 0;
    std::set<memory::ReplicaId> granted_;  ///< granted, not yet started
    std::set<memory::ReplicaId> evicting_;
    std::set<memory::ReplicaId> gone_;  ///< have their receipt; what is left of their memory counts
                                        ///< as that of others
    std::map<memory::ReplicaId, Ticket> restarts_;           ///< restarts that wait
    std::map<memory::ReplicaId, memory::Time> ended_;        ///< ended, without a receipt yet
    /// Of failed loads whose processes are still ending.
    std::map<memory::ReplicaId, Error> failures_;
    std::map<memory::ReplicaId, Told> told_;
    memory::Footprints saved_;
    std::shared_ptr<char> alive_ = std::make_shared<char>();
};

}  // namespace bulkhead::supervisor

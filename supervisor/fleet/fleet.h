#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "supervisor/fleet/admission.h"
#include "supervisor/fleet/blanks.h"
#include "supervisor/fleet/weights_near.h"
#include "supervisor/replica/replica.h"

namespace bulkhead::supervisor {

using Declarations = std::map<std::string, std::string>;  ///< `fingerprint` by model

/// One model of the fleet file with its replicas.
struct Model {
    Model(FleetContext& context, config::ModelSpec declared, const std::optional<LogStore>& logs);

    const config::ModelSpec spec;
    ModelLog log;
    std::vector<std::unique_ptr<Replica>> replicas;  ///< declared after `log`: destroyed before it
    bool retired = false;                            ///< no longer in the fleet file
};

/// What a reload finds: names of models, in the order of the files.
struct FleetChange {
    std::vector<std::string> added;
    std::vector<std::string> removed;
    std::vector<std::string> changed;  ///< another declaration or model file than their process has
    std::vector<std::string> unchanged;

    bool limits_changed = false;  ///< or what starts without a request

    [[nodiscard]] bool is_nothing() const {
        return added.empty() && removed.empty() && changed.empty() && !limits_changed;
    }
};

/// All models, and the requests that concern several of them.
class Fleet {
public:
    using Models = std::vector<Model*>;
    using OnLoaded = std::function<void(Result<std::vector<LoadedReplica>>)>;
    /// Call it if the client leaves before the answer; empty while there is nothing to do.
    using ClientLeft = std::function<void()>;
    using OnUnloaded = std::function<void(Result<std::vector<Receipt>>)>;
    struct Restarted {
        std::vector<LoadedReplica> loaded;
        std::vector<Receipt> receipts;
    };

    Fleet(FleetContext& context, const config::Fleet& declared, const std::optional<LogStore>& logs);

    /// Reads the GPUs if a model on one is planned, then calls `begun`. Call once, before
    /// anything else.
    void begin(Admission::Known known, std::function<void()> begun);
    /// Takes over what former supervisors of this keeper left. Call once, after `begin`.
    /// `former_lines`  log lines of those supervisors
    void adopt(std::vector<FoundWorker> found, const Declarations& declarations, FormerLines former_lines);
    /// Starts the models that run from the start, unless a process of theirs was found.
    void preload();
    [[nodiscard]] Models all() const;
    /// Errors  model_unknown, with the known names
    [[nodiscard]] Result<Model*> find(const std::string& name) const;

    /// Answers when all replicas are ready, or at the first failure.
    /// `connection`  number of the control connection that asks: a client of its own among
    ///               those that wait
    void load(const Models& models, std::optional<std::chrono::milliseconds> deadline, OnLoaded loaded,
              ClientLeft* client_left = nullptr, std::uint64_t connection = 0);
    /// `again`: the caller's former call was lost with a supervisor. A model that was unloaded
    /// since then answers with the receipt of that unload.
    void unload(const Models& models, OnUnloaded unloaded, bool again = false);
    void restart(const Models& models, std::function<void(Result<Restarted>)> restarted, std::uint64_t connection = 0);
    /// Opens a channel to the least busy ready replica; loads the model if none is ready. While the
    /// client waits for room, `client_left` ends that wait.
    void open_channel(Model& model, const Client& client, std::optional<std::chrono::milliseconds> deadline,
                      std::function<void(Result<OpenedChannel>)> opened, ClientLeft* client_left = nullptr);

    /// Returns one row for each replica after asking every worker for statistics. A worker that
    /// does not answer within `statistics_deadline` is shown with its last known values.
    void status(std::function<void(json::array)> answered);

    /// Unloads models and replicas that `next` no longer has. Those models cannot be
    /// loaded from now on.
    void retire(const config::Fleet& next, std::function<void()> retired);
    /// `declarations`  of the models of `next`
    [[nodiscard]] FleetChange compare(const config::Fleet& next, const Declarations& declarations) const;
    /// The keeper was asked to spawn a process and has not answered.
    [[nodiscard]] bool is_spawning() const;

    /// Unloads everything and refuses further loads. Passes on the receipts of the processes that
    /// could be ended.
    void stop(std::function<void(std::vector<Receipt>)> stopped);
    [[nodiscard]] bool is_stopping() const noexcept { return stopping_; }

    /// Call after the loop, before anything is destroyed. False: a thread is stuck,
    /// see BlockingQueue::end.
    [[nodiscard]] bool end_threads() { return near_.end(); }

    [[nodiscard]] FleetContext& context() noexcept { return context_; }
    [[nodiscard]] Admission& admission() noexcept { return admission_; }
    [[nodiscard]] const Admission& admission() const noexcept { return admission_; }
    [[nodiscard]] Blanks& blanks() noexcept { return blanks_; }

private:
    [[nodiscard]] Replica* replica_of(const memory::ReplicaId& who) const;
    Admission::Ticket load_planned(const Model& model, std::optional<std::chrono::milliseconds> deadline,
                                   OnLoaded loaded, std::uint64_t connection);
    /// Calls `then` when it is loaded, or will not be before its first request.
    void preload_planned(const Model& model, std::function<void()> then);
    void ask_for_preload(const Model& model, std::function<void()> then);
    void start_next(std::size_t index);
    void begin_blanks();
    void on_gpus_came();
    void unload_replicas(const std::vector<Replica*>& replicas, OnUnloaded unloaded, bool again);
    [[nodiscard]] std::vector<NearCandidate> near_candidates() const;
    void tell_status();

    FleetContext& context_;
    const config::Fleet declared_;
    const std::optional<LogStore> logs_;
    Blanks blanks_;
    Admission admission_;
    std::vector<std::unique_ptr<Model>> models_;
    WeightsNear near_;
    bool has_begun_ = false;  ///< with what runs from the start
    bool stopping_ = false;
    /// Wait for the inquiry under way.
    std::vector<std::function<void(json::array)>> status_waiters_;
    Deadline status_deadline_;
};

}  // namespace bulkhead::supervisor

#pragma once

#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "supervisor/replica.h"

namespace bulkhead::supervisor {

/// One model of the fleet file with its replicas.
struct Model {
    Model(FleetContext& context, config::ModelSpec declared, const std::optional<std::filesystem::path>& log_folder);

    const config::ModelSpec spec;
    ModelLog log;
    std::vector<std::unique_ptr<Replica>> replicas;  ///< die before their log
};

/// Every model, and what can be asked of several at once.
class Fleet {
public:
    using Models = std::vector<Model*>;
    using OnLoaded = std::function<void(Result<std::vector<LoadedReplica>>)>;
    using OnUnloaded = std::function<void(Result<std::vector<Receipt>>)>;
    struct Restarted {
        std::vector<LoadedReplica> loaded;
        std::vector<Receipt> receipts;
    };

    Fleet(FleetContext& context, const config::Fleet& declared, const std::optional<std::filesystem::path>& log_folder);

    void preload();
    [[nodiscard]] Models all() const;
    /// Errors  model_unknown, with the names there are
    [[nodiscard]] Result<Model*> find(const std::string& name) const;

    /// Answers when all replicas are ready, or at the first failure.
    void load(const Models& models, std::optional<std::chrono::milliseconds> deadline, OnLoaded loaded);
    void unload(const Models& models, OnUnloaded unloaded);
    void restart(const Models& models, std::function<void(Result<Restarted>)> restarted);
    /// To the ready replica with the fewest channels; loads the model if none is.
    void open_channel(Model& model, const Client& client, std::optional<std::chrono::milliseconds> deadline,
                      std::function<void(Result<OpenedChannel>)> opened);

    /// One row a replica, after every worker was asked for its statistics; who does not answer within
    /// `statistics_deadline` is shown as last known.
    void status(std::function<void(json::array)> answered);

    /// Unloads everything; from now on nothing is loaded. Receipts of those that could be ended.
    void stop(std::function<void(std::vector<Receipt>)> stopped);
    [[nodiscard]] bool is_stopping() const noexcept { return stopping_; }

    [[nodiscard]] FleetContext& context() noexcept { return context_; }

private:
    [[nodiscard]] std::vector<Replica*> replicas_of(const Models& models) const;
    [[nodiscard]] Result<> refuse_when_stopping() const;
    void tell_status();

    FleetContext& context_;
    std::vector<std::unique_ptr<Model>> models_;
    bool stopping_ = false;
    std::vector<std::function<void(json::array)>> status_waiters_;  ///< of the one inquiry under way
    Deadline status_deadline_;
};

}  // namespace bulkhead::supervisor

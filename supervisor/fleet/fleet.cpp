#include "supervisor/fleet/fleet.h"

#include <algorithm>

#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include "supervisor/base/limits.h"
#include "supervisor/base/when_all.h"
#include "supervisor/fleet/orphan_worker.h"
#include "supervisor/replica/replica_record.h"

namespace bulkhead::supervisor {

namespace {

std::vector<Replica*> replicas_of(const Fleet::Models& models) {
    std::vector<Replica*> replicas;
    for (const Model* model : models)
        for (const auto& replica : model->replicas) replicas.push_back(replica.get());
    return replicas;
}

Error daemon_stops() { return {ErrorCode::worker_draining, "loading: the daemon is stopping", "start it again"}; }

}  // namespace

Model::Model(FleetContext& context, config::ModelSpec declared, const std::optional<LogStore>& logs)
    : spec{std::move(declared)}, log{spec.name, logs} {
    for (std::uint32_t i = 0; i < spec.replicas; ++i)
        replicas.push_back(std::make_unique<Replica>(context, spec, i, log));
}

Fleet::Fleet(FleetContext& context, const config::Fleet& declared, const std::optional<LogStore>& logs)
    : context_{context}, declared_{declared}, logs_{logs}, blanks_{context},
      admission_{context, blanks_, [this](const memory::ReplicaId& who) { return replica_of(who); }},
      near_{context.io, declared_, context.launch.cache, [this] { return near_candidates(); }}, status_deadline_{
                                                                                                    context.io} {
    for (const auto& spec : declared_.models) models_.push_back(std::make_unique<Model>(context, spec, logs));
    admission_.gpus_came = [this] { on_gpus_came(); };
    context_.on_gpu_quarantined = [this](const std::string& uuid) {
        for (Replica* replica : replicas_of(all())) replica->gpu_was_quarantined(uuid);
    };
    context_.gpu_quarantine.lifted = [this] {
        for (Replica* replica : replicas_of(all())) replica->gpu_was_lifted();
    };
}

Replica* Fleet::replica_of(const memory::ReplicaId& who) const {
    for (const auto& model : models_)
        if (model->spec.name == who.model && who.replica < model->replicas.size())
            return model->replicas[who.replica].get();
    return nullptr;
}

void Fleet::begin(Admission::Known known, std::function<void()> begun) {
    const auto begin = [this, begun = std::move(begun)](Admission::Known all) {
        admission_.begin(declared_, logs_, std::move(all));
        begun();
    };
    if (!Admission::needs_gpus(declared_)) return begin(std::move(known));
    context_.blocking.run(
        "asking which GPUs there are", [&gpus = context_.gpus] { return gpus.read(); },
        [begin, known = std::move(known)](Result<std::vector<Gpu>> gpus) mutable {
            if (gpus) {
                known.gpus = std::move(*gpus);
            } else {
                spdlog::error("models wait for their GPUs: {}", gpus.error().text());
                known.no_gpus = gpus.error();
            }
            begin(std::move(known));
        });
}

void Fleet::adopt(std::vector<FoundWorker> found, const Declarations& declarations, FormerLines former_lines) {
    for (const auto& model : models_) model->log.restore(std::move(former_lines[model->spec.name]));
    std::map<Replica*, std::vector<FoundWorker>> by_replica;
    for (FoundWorker& worker : found) {
        const auto record = ReplicaRecord::parse(worker.ledger);
        if (record && record->name) {
            worker.name = *record->name;
            context_.generation_last = std::max(context_.generation_last, worker.name.generation);
        }
        const bool is_blank = worker.name.model == Blanks::model;
        if (Replica* replica = replica_of({worker.name.model, worker.name.replica}))
            by_replica[replica].push_back(std::move(worker));
        else
            end_orphan(context_, std::move(worker), record ? record->gpu_uuid : "",
                       is_blank ? "a former supervisor's blank" : "the fleet has no such replica");
    }
    for (auto& [replica, workers] : by_replica) {
        std::ranges::sort(workers, {}, [](const FoundWorker& one) { return one.name.generation; });
        FoundWorker newest = std::move(workers.back());
        workers.pop_back();
        const auto read = ReplicaRecord::parse(newest.ledger);
        std::optional<ReplicaRecord> record = read ? std::optional{*read} : std::nullopt;
        for (FoundWorker& older : workers) {
            // The supervisor of the newest process died before it wrote a record: take the
            // replica's part from the record of the process before.
            const auto former = ReplicaRecord::parse(older.ledger);
            if (former && newest.ledger.empty()) {
                record = ReplicaRecord{};
                static_cast<ReplicaPart&>(*record) = *former;
            }
            end_orphan(context_, std::move(older), former ? former->gpu_uuid : "",
                       "a later process has taken its place");
        }
        admission_.adopt(newest, record);
        const auto declaration = declarations.find(newest.name.model);
        replica->adopt(std::move(newest), std::move(record),
                       declaration == declarations.end() ? "" : declaration->second);
    }
}

void Fleet::preload() {
    has_begun_ = true;
    start_next(0);
    begin_blanks();
    near_.look();
}

void Fleet::begin_blanks() {
    blanks_.begin(declared_, [this](const config::ModelSpec& spec) { return admission_.gpus_of(spec); });
    admission_.fit_blanks();
}

/// Starts what was refused at the start, since its GPU was not known, in the order of the start.
void Fleet::on_gpus_came() {
    if (!has_begun_ || stopping_) return;
    begin_blanks();
    std::vector<const Model*> models;
    for (const std::string& name : declared_.startup) models.push_back(*find(name));
    for (const auto& model : models_)
        if (std::ranges::find(models, model.get()) == models.end()) models.push_back(model.get());
    for (const Model* model : models) {
        const bool waits = std::ranges::any_of(model->replicas, [](const auto& replica) {
            return replica->state() == WorkerState::stopped && replica->is_kept_running();
        });
        if (waits && !admission_.gpus_of(model->spec).empty()) ask_for_preload(*model, [] {});
    }
}

std::vector<NearCandidate> Fleet::near_candidates() const {
    std::vector<NearCandidate> all;
    for (const auto& model : models_) {
        NearCandidate one{model->spec.name, 0, model->spec.near};
        for (const auto& replica : model->replicas) {
            one.loaded = one.loaded || replica->process();
            one.unloaded_ms = std::max(one.unloaded_ms, replica->changed_ms());
        }
        all.push_back(std::move(one));
    }
    return all;
}

namespace {

bool was_found(const Model& model) {
    return std::ranges::any_of(model.replicas, [](const auto& replica) { return replica->was_found(); });
}

std::string asker_of(std::uint64_t connection) { return fmt::format("connection {}", connection); }

}  // namespace

/// Starts those of `startup` one after the other, even if one fails; then the others.
void Fleet::start_next(std::size_t index) {
    if (stopping_) return;
    if (index < declared_.startup.size()) {
        Model* model = *find(declared_.startup[index]);
        const auto next = [this, index] { start_next(index + 1); };
        if (admission_.plans(model->spec.name)) return preload_planned(*model, next);
        if (was_found(*model)) return next();
        for (const auto& replica : model->replicas) replica->keep_running();
        return load({model}, {}, [next](const auto&) { next(); });
    }
    for (const auto& model : models_) {
        const bool is_started = std::ranges::find(declared_.startup, model->spec.name) != declared_.startup.end();
        if (!model->spec.preload || is_started) continue;
        if (admission_.plans(model->spec.name)) {
            preload_planned(*model, [] {});
        } else {
            for (const auto& replica : model->replicas)
                if (!replica->was_found()) replica->preload();
        }
    }
}

void Fleet::preload_planned(const Model& model, std::function<void()> then) {
    const auto still_loads = [](const auto& replica) {
        const auto& process = replica->process();
        return process && !process->ready_at && !process->end.exit;
    };
    if (was_found(model) && std::ranges::none_of(model.replicas, still_loads)) return then();
    ask_for_preload(model, std::move(then));
}

void Fleet::ask_for_preload(const Model& model, std::function<void()> then) {
    for (std::uint32_t i = 0; i < model.spec.replicas_min; ++i) model.replicas[i]->keep_running();
    admission_.ask(model.spec.name, memory::Asker::preload, "preload", {},
                   [&model, then = std::move(then)](const Result<Replica*>& served) {
                       if (!served)
                           spdlog::warn("model={} is not preloaded: {}", model.spec.name, served.error().text());
                       then();
                   });
}

void Fleet::retire(const config::Fleet& next, std::function<void()> retired) {
    std::vector<Replica*> surplus;
    for (const auto& model : models_) {
        const auto kept = std::ranges::find(next.models, model->spec.name, &config::ModelSpec::name);
        model->retired = kept == next.models.end();
        for (const auto& replica : model->replicas)
            if (model->retired || replica->index() >= kept->replicas) surplus.push_back(replica.get());
    }
    unload_replicas(
        surplus, [retired = std::move(retired)](const auto&) { retired(); }, false);
}

FleetChange Fleet::compare(const config::Fleet& next, const Declarations& declarations) const {
    // A stopped replica looks at the file when it is loaded.
    const auto has_another_file = [&](const auto& replica) {
        return replica->state() != WorkerState::stopped && !replica->declaration().empty() &&
               replica->declaration() != declarations.at(replica->spec().name);
    };
    FleetChange change;
    change.limits_changed = declared_.limits != next.limits || declared_.startup != next.startup ||
                            declared_.blanks != next.blanks || declared_.near_bytes != next.near_bytes;
    for (const auto& model : models_)
        if (std::ranges::find(next.models, model->spec.name, &config::ModelSpec::name) == next.models.end())
            change.removed.push_back(model->spec.name);
    for (const config::ModelSpec& spec : next.models) {
        const auto former = std::ranges::find(models_, spec.name, [](const auto& model) { return model->spec.name; });
        if (former == models_.end())
            change.added.push_back(spec.name);
        else if ((*former)->spec != spec || std::ranges::any_of((*former)->replicas, has_another_file))
            change.changed.push_back(spec.name);
        else
            change.unchanged.push_back(spec.name);
    }
    return change;
}

bool Fleet::is_spawning() const {
    const auto replicas = replicas_of(all());
    return std::ranges::any_of(replicas, [](const Replica* replica) {
        return replica->process() && (replica->process()->pid == 0 || replica->declaration().empty());
    });
}

Fleet::Models Fleet::all() const {
    Models models;
    for (const auto& model : models_) models.push_back(model.get());
    return models;
}

Result<Model*> Fleet::find(const std::string& name) const {
    std::string known;
    for (const auto& model : models_) {
        if (model->retired) continue;
        if (model->spec.name == name) return model.get();
        known += (known.empty() ? "" : ", ") + model->spec.name;
    }
    return Error{ErrorCode::model_unknown, fmt::format("looking up model \"{}\"", escaped(name.substr(0, 128))),
                 known.empty() ? "the fleet has no models" : "the fleet has " + known};
}

void Fleet::load(const Models& models, std::optional<std::chrono::milliseconds> deadline, OnLoaded loaded,
                 ClientLeft* client_left, std::uint64_t connection) {
    if (stopping_) return loaded(daemon_stops());
    if (models.empty()) return loaded(std::vector<LoadedReplica>{});
    using Loaded = std::vector<LoadedReplica>;
    const auto all = when_all<Loaded>(models.size(), OnError::answer_at_once,
                                      [loaded = std::move(loaded)](Result<std::vector<Loaded>> by_model) {
                                          if (!by_model) return loaded(by_model.error());
                                          Loaded flat;
                                          for (Loaded& one : *by_model) flat.insert(flat.end(), one.begin(), one.end());
                                          loaded(std::move(flat));
                                      });
    std::vector<Admission::Ticket> tickets;
    for (std::size_t i = 0; i < models.size(); ++i) {
        if (admission_.plans(models[i]->spec.name)) {
            tickets.push_back(load_planned(*models[i], deadline, all[i], connection));
            continue;
        }
        const auto& replicas = models[i]->replicas;
        const auto each = when_all<LoadedReplica>(replicas.size(), OnError::answer_at_once, all[i]);
        for (std::size_t k = 0; k < replicas.size(); ++k) replicas[k]->load(each[k], Replica::Urgency::now, deadline);
    }
    if (client_left != nullptr && !tickets.empty())
        *client_left = [this, tickets] {
            for (const auto ticket : tickets) admission_.leave(ticket);
        };
}

Admission::Ticket Fleet::load_planned(const Model& model, std::optional<std::chrono::milliseconds> deadline,
                                      OnLoaded loaded, std::uint64_t connection) {
    for (const auto& replica : model.replicas)
        // A person asked for this load.
        if (replica->state() == WorkerState::quarantined) replica->clear_crashes();
    return admission_.ask(
        model.spec.name, memory::Asker::person, asker_of(connection), deadline,
        [&model, loaded = std::move(loaded), began = Deadline::Clock::now()](const Result<Replica*>& served) {
            if (!served) return loaded(served.error());
            const auto took =
                std::chrono::duration_cast<std::chrono::milliseconds>(Deadline::Clock::now() - began).count();
            std::vector<LoadedReplica> all;
            for (const auto& replica : model.replicas)
                if (is_serving(replica->state()))
                    all.push_back({replica->process()->name, replica->state(), replica->process()->pid, took});
            loaded(std::move(all));
        });
}

void Fleet::unload(const Models& models, OnUnloaded unloaded, bool again) {
    for (const Model* model : models)
        admission_.refuse(model->spec.name,
                          {ErrorCode::cancelled, fmt::format("loading {}: it was asked to unload", model->spec.name),
                           "load it again"});
    unload_replicas(replicas_of(models), std::move(unloaded), again);
}

void Fleet::unload_replicas(const std::vector<Replica*>& replicas, OnUnloaded unloaded, bool again) {
    using Maybe = std::optional<Receipt>;
    if (replicas.empty()) return unloaded(std::vector<Receipt>{});
    const auto answer = [replicas, unloaded = std::move(unloaded)](Result<std::vector<Maybe>> results) {
        if (!results) return unloaded(results.error());
        std::vector<Receipt> receipts;
        std::vector<Replica*> told;
        for (std::size_t i = 0; i < replicas.size(); ++i) {
            if (!(*results)[i]) continue;
            receipts.push_back(std::move(*(*results)[i]));
            told.push_back(replicas[i]);
        }
        unloaded(std::move(receipts));
        // Answer first: if this supervisor dies in between, its successor still has the receipts.
        for (Replica* replica : told) replica->receipt_told();
    };
    const auto each = when_all<Maybe>(replicas.size(), OnError::wait_for_all, answer);
    for (std::size_t i = 0; i < replicas.size(); ++i) {
        if (again && replicas[i]->state() == WorkerState::stopped && replicas[i]->kept_receipt())
            each[i](Maybe{replicas[i]->kept_receipt()});
        else
            replicas[i]->unload(each[i]);
    }
}

void Fleet::restart(const Models& models, std::function<void(Result<Restarted>)> restarted, std::uint64_t connection) {
    if (stopping_) return restarted(daemon_stops());
    unload(models, [this, models, connection, restarted = std::move(restarted)](Result<std::vector<Receipt>> receipts) {
        if (!receipts) return restarted(receipts.error());
        for (Replica* replica : replicas_of(models)) replica->clear_crashes();
        const auto answer = [receipts = std::move(*receipts), restarted](Result<std::vector<LoadedReplica>> loaded) {
            if (!loaded) return restarted(loaded.error());
            restarted(Restarted{std::move(*loaded), receipts});
        };
        load(models, {}, answer, nullptr, connection);
    });
}

void Fleet::open_channel(Model& model, const Client& client, std::optional<std::chrono::milliseconds> deadline,
                         std::function<void(Result<OpenedChannel>)> opened, ClientLeft* client_left) {
    if (stopping_) return opened(daemon_stops());
    // Prefers the least used ready replica, then one that is loading, then any.
    const auto rank = [](const Replica& replica) {
        if (is_serving(replica.state())) return 0;
        if (is_loading(replica.state()) || replica.state() == WorkerState::adopting) return 1;
        return replica.state() == WorkerState::quarantined ? 3 : 2;
    };
    const auto best = std::ranges::min_element(model.replicas, [&](const auto& a, const auto& b) {
        return std::pair{rank(*a), a->channels()} < std::pair{rank(*b), b->channels()};
    });
    Replica& replica = **best;
    if ((replica.state() == WorkerState::draining || replica.state() == WorkerState::stopping) &&
        !replica.is_being_replaced() && !admission_.is_evicting(replica))
        return opened(replica.open_channel(client));  // refuses: a reconnecting client does not
                                                      // undo an unload
    if (admission_.plans(model.spec.name) && replica.state() != WorkerState::quarantined) {
        const auto ticket = admission_.ask(model.spec.name, memory::Asker::channel, asker_of(client.connection),
                                           deadline, [client, opened](const Result<Replica*>& served) {
                                               if (!served) return opened(served.error());
                                               opened((*served)->open_channel(client));
                                           });
        if (client_left != nullptr) *client_left = [this, ticket] { admission_.leave(ticket); };
        return;
    }
    replica.load(
        [&replica, client, opened = std::move(opened)](const Result<LoadedReplica>& loaded) {
            if (!loaded) return opened(loaded.error());
            opened(replica.open_channel(client));
        },
        Replica::Urgency::when_due, deadline);
}

void Fleet::status(std::function<void(json::array)> answered) {
    status_waiters_.push_back(std::move(answered));
    if (status_waiters_.size() > 1) return;  // shares the inquiry under way
    const auto replicas = replicas_of(all());
    const auto left = std::make_shared<std::size_t>(2 * replicas.size() + 1);
    const auto one_less = [this, left] {
        if (--*left == 0) tell_status();
    };
    status_deadline_.arm(limits::statistics_deadline, [this, left] {
        *left = 0;  // late answers count down from here and have no effect
        tell_status();
    });
    const bool may_sample = context_.blocking.waiting() < limits::blocking_requests_max;
    for (Replica* replica : replicas) {
        replica->ask_statistics(one_less);
        if (may_sample)
            replica->sample_memory(one_less);
        else
            one_less();
    }
    one_less();
}

void Fleet::tell_status() {
    status_deadline_.cancel();
    json::array rows;
    for (const Replica* replica : replicas_of(all())) {
        json::object row = replica->row();
        row["memory"] = admission_.footprint(*replica);
        admission_.add_outlook(*replica, row);
        row["near"] = json::value_from(near_.is_near(replica->spec().name));
        rows.push_back(std::move(row));
    }
    for (const auto& answered : std::exchange(status_waiters_, {})) answered(rows);
}

void Fleet::stop(std::function<void(std::vector<Receipt>)> stopped) {
    stopping_ = true;
    admission_.refuse("", daemon_stops());
    using Maybe = std::optional<Receipt>;
    const auto replicas = replicas_of(all());
    const auto each = when_all<Maybe>(replicas.size() + 1, OnError::wait_for_all,
                                      [stopped = std::move(stopped)](Result<std::vector<Maybe>> results) {
                                          std::vector<Receipt> receipts;
                                          for (auto& receipt : *results)
                                              if (receipt) receipts.push_back(std::move(*receipt));
                                          stopped(std::move(receipts));
                                      });
    for (std::size_t i = 0; i < replicas.size(); ++i)
        replicas[i]->unload([slot = each[i]](Result<Maybe> receipt) {
            slot(receipt ? std::move(*receipt) : Maybe{});  // a process that cannot be
                                                            // ended was logged
        });
    blanks_.stop([slot = each.back()] { slot(Maybe{}); });
}

}  // namespace bulkhead::supervisor

#include "supervisor/supervisor.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <set>
#include <thread>

#include <boost/asio/post.hpp>
#include <spdlog/spdlog.h>

#include "config/limits.h"
#include "supervisor/base/limits.h"
#include "supervisor/base/text.h"
#include "supervisor/control/control_server.h"
#include "supervisor/control/methods.h"
#include "supervisor/fleet/fleet_files.h"
#include "supervisor/fleet/stale_process.h"
#include "supervisor/keeper_link/keeper_client.h"
#include "supervisor/keeper_link/keeper_death.h"
#include "supervisor/keeper_link/next_supervisor.h"
#include "supervisor/log/daemon_log.h"
#include "supervisor/replica/replica_record.h"

namespace bulkhead::supervisor {

namespace {

Declarations declarations_of(const std::vector<config::ModelSpec>& models,
                             std::string (*of)(const config::ModelSpec&) = fingerprint) {
    Declarations declarations;
    for (const auto& model : models) declarations[model.name] = of(model);
    return declarations;
}

std::string text_of(keeper_link::UpgradeFailure failure) {
    switch (failure) {
    case keeper_link::UpgradeFailure::none: return "";
    case keeper_link::UpgradeFailure::state: return "its state could not be written";
    case keeper_link::UpgradeFailure::refused: return "the installed program does not start, or not with its state";
    case keeper_link::UpgradeFailure::execute: return "the installed program could not be executed";
    }
    return "it says no reason that this supervisor knows";
}

class Supervisor {
public:
    explicit Supervisor(SupervisorOptions options)
        : options_{std::move(options)}, keeper_{io_, std::move(options_.keeper_link)} {}

    int run() {
        end_with_keeper();
        keeper_.start({[this](const keeper_link::KeeperHello& hello, std::vector<FoundWorker> found) {
                           found_ = std::move(found);
                           on_keeper_ready(hello);
                       },
                       [this] {
                           spdlog::info("the keeper was asked to stop");
                           if (phase_ != Phase::starting) return stop([](const std::vector<Receipt>&) {});
                           early_order_ = Order::stop;
                       },
                       [this] {
                           spdlog::info("the keeper was asked to reload");
                           if (phase_ != Phase::starting) return reload([](const Reloaded&) {});
                           early_order_ = std::max(early_order_, Order::reload);
                       },
                       [this](const Error* why) {
                           if (phase_ != Phase::ending) {
                               spdlog::error("the link to the keeper ended{}{}", why != nullptr ? ": " : "",
                                             why != nullptr ? why->text() : "");
                               status_ = 1;
                           }
                           io_.stop();
                       }});
        io_.run();
        // The death signal follows the end of the link; it does not come if the keeper lives.
        if (status_ != 0) std::this_thread::sleep_for(limits::keeper_death_wait);
        kill_with_keeper(-1);  // its descriptor is closed from here on
        const bool fleet_ends = !fleet_ || fleet_->end_threads();
        const bool checks_end = checks_.end();
        if (!blocking_.end() || !checks_end || !fleet_ends) {
            (void)end_daemon_log(options_.logs);
            std::_Exit(status_);
        }
        return status_;
    }

private:
    struct Reread {
        config::ReadFleet read;
        Declarations declarations;
    };

    void on_keeper_ready(const keeper_link::KeeperHello& hello) {
        context_.emplace(FleetContext{io_, keeper_, blocking_, gpus_, events_, {}, nullptr});
        context_->launch = {options_.worker_program,
                            daemon_token(hello.keeper_pid, hello.started_unix_ms),
                            options_.socket,
                            options_.cache,
                            std::move(options_.inherited),
                            options_.python_start,
                            allowed_cores()};
        if (options_.logs) {
            context_->crash_reports = std::make_shared<CrashReports>(options_.logs->folder / "crashes");
            context_->log_writer = options_.logs->writer;
            read_former(*options_.logs, hello);
        }
        context_->generation_last = hello.generation_last;
        // The keeper does not know names that blanks were given: at most `blanks_max` of them since
        // its last spawn.
        if (hello.supervisor_starts > 1 && !options_.fleet.blanks.empty())
            context_->generation_last += config::limits::blanks_max;
        context_->channel_last = hello.supervisor_starts << 32U;
        facts_.keeper = hello;
        facts_.keeper_upgrade_failed = text_of(static_cast<keeper_link::UpgradeFailure>(hello.upgrade_failed));
        facts_.fleet_error = options_.fleet_error;
        facts_.socket = options_.socket;
        facts_.fleet_file = options_.fleet.source.string();

        // Leftovers of a former daemon on this socket would hold memory that this fleet needs.
        std::set<std::string> keep;
        for (const FoundWorker& worker : found_) keep.insert(context_->launch.marker(worker.born_as));
        blocking_.run(
            "looking at the models' files",
            [models = options_.fleet.models] {
                return std::pair{declarations_of(models), file_facts(models)};
            },
            [this](Result<std::pair<Declarations, std::map<std::string, FileFacts>>> seen) {
                declarations_ =
                    seen ? std::move(seen->first) : declarations_of(options_.fleet.models, fingerprint_of_text);
                if (seen) known_.files = std::move(seen->second);
            });
        blocking_.run(
            "ending what a former daemon left behind",
            [socket = options_.socket, keep = std::move(keep)] { return kill_stale_processes(socket, keep); },
            [this](Result<std::vector<StaleProcess>> processes) {
                watch_stale_processes(*context_, processes ? std::move(*processes) : std::vector<StaleProcess>{},
                                      [this] { begin(); });
            });
    }

    /// Reads what former supervisors knew before anything may start on a GPU, in one job: a
    /// hanging disk is waited for once. GPU state counts however late it arrives, and is not
    /// overwritten before.
    void read_former(const LogStore& logs, const keeper_link::KeeperHello& hello) {
        std::vector<std::string> models;
        if (hello.supervisor_starts > 1)
            for (const auto& model : options_.fleet.models) models.push_back(model.name);
        blocking_.run(
            "reading which GPUs a former supervisor had quarantined, and what it logged",
            [this, logs, models = std::move(models), since = static_cast<std::int64_t>(hello.started_unix_ms)] {
                boost::asio::post(io_, [this, logs, known = load_gpu_quarantine(logs.folder)]() mutable {
                    keep_gpu_quarantine(logs, std::move(known));
                });
                FormerLines lines;
                for (const std::string& model : models) lines[model] = ModelLog::read_back(logs.folder, model, since);
                return std::pair{std::move(lines), read_footprints(logs.folder)};
            },
            [this](Result<std::pair<FormerLines, memory::Footprints>> former) {
                if (former) former_lines_ = std::move(former->first);
                if (former) known_.footprints = std::move(former->second);
                if (!former)
                    spdlog::error("{}; a quarantine counts from the moment that it is read", former.error().text());
            });
    }

    void keep_gpu_quarantine(const LogStore& logs, std::optional<GpuQuarantine::State> known) {
        GpuQuarantine& quarantine = context_->gpu_quarantine;
        const bool is_late = quarantine.state() != GpuQuarantine::State{};
        if (known) quarantine.restore(std::move(*known));
        for (const auto& [uuid, reason] : quarantine.all())
            spdlog::warn("gpu={} is quarantined since a former supervisor: {}", uuid, escaped(reason));
        quarantine.changed = [logs](const GpuQuarantine::State& state) {
            logs.writer->save("GPU quarantine", [folder = logs.folder, state] { save_gpu_quarantine(folder, state); });
        };
        if (is_late) quarantine.changed(quarantine.state());
    }

    void begin() {
        std::vector<WorkerName> keep;
        for (const FoundWorker& worker : found_) keep.push_back(worker.born_as);
        context_->cgroups = Cgroups::make({facts_.keeper.keeper_pid, options_.socket}, keep);
        kill_with_keeper(context_->cgroups ? context_->cgroups->kill_all_fd() : -1);
        facts_.containment =
            context_->cgroups ? "cgroup " + context_->cgroups->path().string() : "process group and marker";
        context_->memory_limits = MemoryLimits::make(context_->cgroups.get(), facts_.keeper.keeper_pid);
        fleet_.emplace(*context_, options_.fleet, options_.logs);
        known_.keys = declarations_;
        fleet_->begin(std::move(known_), [this] { serve(); });
    }

    void serve() {
        phase_ = Phase::serving;
        daemon_.emplace(Daemon{*fleet_, facts_, [this](auto stopped) { stop(std::move(stopped)); },
                               [this](auto reloaded) { reload(std::move(reloaded)); },
                               [this](bool with_keeper, auto checked) { upgrade(with_keeper, std::move(checked)); }});
        server_.emplace(io_, std::move(options_.listener), make_methods(*daemon_));
        spdlog::info("supervisor {} pid={} keeper_pid={} fleet={} models={} containment=\"{}\" socket={}",
                     BULKHEAD_VERSION, ::getpid(), facts_.keeper.keeper_pid, facts_.fleet_file,
                     options_.fleet.models.size(), facts_.containment, facts_.socket);
        if (!facts_.fleet_error.empty())
            spdlog::error("the fleet file has errors, and the fleet that was last good stays in force: {}",
                          facts_.fleet_error);
        const std::size_t found = found_.size();
        fleet_->adopt(std::exchange(found_, {}), declarations_, std::exchange(former_lines_, {}));
        if (facts_.keeper.supervisor_starts > 1)
            spdlog::info("supervisor number {} of this keeper found {} records of workers",
                         facts_.keeper.supervisor_starts, found);
        if (early_order_ == Order::stop) return stop([](const std::vector<Receipt>&) {});
        server_->start();
        if (early_order_ == Order::reload) reload([](const Reloaded&) {});
        fleet_->preload();
    }

    void stop(std::function<void(std::vector<Receipt>)> stopped) {
        fleet_->stop([this, stopped = std::move(stopped)](std::vector<Receipt> receipts) {
            stopped(std::move(receipts));
            end();
        });
    }

    void end() {
        if (phase_ == Phase::ending) return;
        finish([this] {
            spdlog::info("stopped");
            keeper_.stop();
        });
    }

    /// Sends the last answers, then the last word to the keeper, and leaves the loop.
    void finish(std::function<void()> tell_keeper) {
        phase_ = Phase::ending;
        server_->finish([this, tell_keeper = std::move(tell_keeper)] {
            tell_keeper();
            // A keeper that has not read its link by then does not need the last message either.
            wait_briefly([this] { return keeper_.is_flushed(); }, [this] { io_.stop(); });
        });
    }

    /// Calls `go_on` once `is_so` holds, at the latest after `control_flush_deadline`.
    void wait_briefly(std::function<bool()> is_so, std::function<void()> go_on,
                      Deadline::Clock::time_point until = Deadline::Clock::now() + limits::control_flush_deadline) {
        if (is_so() || Deadline::Clock::now() >= until) return go_on();
        end_check_.arm(limits::settle_poll, [this, is_so = std::move(is_so), go_on = std::move(go_on), until] {
            wait_briefly(is_so, go_on, until);
        });
    }

    /// Rejects an invalid file; the fleet does not change.
    void reload(std::function<void(const Reloaded&)> reloaded) {
        reload_waiters_.push_back(std::move(reloaded));
        // Shares the reading under way.
        if (reload_waiters_.size() > 1 || phase_ == Phase::ending) return;
        blocking_.run(
            "reading the fleet file and looking at the models' files",
            [file = options_.fleet.source] {
                Reread reread{config::read_fleet(file), {}};
                if (reread.read.ok()) reread.declarations = declarations_of(reread.read.fleet.models);
                return reread;
            },
            [this](Result<Reread> reread) {
                if (reread) return on_reread(std::move(*reread));
                spdlog::error("reload refused: {}", reread.error().text());
                stay({{}, {}, reread.error()});
            });
    }

    void on_reread(Reread reread) {
        if (fleet_->is_stopping()) return stay({});
        for (const auto& diagnostic : reread.read.diagnostics) spdlog::error("reload refused: {}", diagnostic.text());
        if (!reread.read.ok()) return stay({{}, std::move(reread.read.diagnostics)});
        for (const auto& warning : reread.read.warnings) spdlog::warn("reload: {}", warning.text());
        Reloaded reloaded;
        reloaded.change = fleet_->compare(reread.read.fleet, reread.declarations);
        const FleetChange& change = reloaded.change;
        spdlog::info("reload: {} models added, {} removed, {} changed, {} unchanged", change.added.size(),
                     change.removed.size(), change.changed.size(), change.unchanged.size());
        if (change.is_nothing() && facts_.fleet_error.empty()) return stay(reloaded);
        check_next(false, [this, fleet = std::move(reread.read.fleet),
                           reloaded = std::move(reloaded)](const Result<>& checked) mutable {
            if (fleet_->is_stopping() || phase_ == Phase::ending) return stay({});
            if (!checked) {
                spdlog::error("reload refused: {}", checked.error().text());
                return stay({{}, {}, checked.error()});
            }
            fleet_->retire(fleet, [this, reloaded = std::move(reloaded)] {
                answer_reload(reloaded);
                hand_over(false);
            });
        });
    }

    /// The keeper cannot return to a supervisor that has ended. So the installed program must
    /// first show that it runs, and that it speaks to the present keeper, which stays if it cannot
    /// be re-executed.
    void check_next(bool with_keeper, std::function<void(Result<>)> checked) {
        checks_.run(
            "trying the installed program",
            [with_keeper, fleet = facts_.fleet_file, min = facts_.keeper.version_min, max = facts_.keeper.version_max] {
                return supervisor::check_next(next_program(with_keeper), fleet, min, max);
            },
            std::move(checked));
    }

    void upgrade(bool with_keeper, std::function<void(const Result<>&)> answer) {
        check_next(with_keeper, [this, with_keeper, answer = std::move(answer)](const Result<>& checked) {
            if (!checked) spdlog::error("upgrade refused: {}", checked.error().text());
            answer(checked);
            if (checked) hand_over(with_keeper);
        });
    }

    void answer_reload(const Reloaded& reloaded) {
        for (const auto& answer : std::exchange(reload_waiters_, {})) answer(reloaded);
    }

    /// No successor is needed or wanted.
    void stay(const Reloaded& reloaded) {
        keeper_.reload_done();
        answer_reload(reloaded);
    }

    /// The keeper already has the ledgers. A process that is being spawned has none yet: wait for
    /// it briefly.
    void hand_over(bool with_keeper) {
        if (fleet_->is_stopping() || phase_ != Phase::serving) return;
        phase_ = Phase::handing_over;
        wait_briefly([this] { return !fleet_->is_spawning(); },
                     [this, with_keeper] {
                         // A stop arrived meanwhile and takes precedence.
                         if (fleet_->is_stopping() || phase_ == Phase::ending) return;
                         finish([this, with_keeper] {
                             spdlog::info("supervisor pid={} hands over to its successor", ::getpid());
                             keeper_.hand_over(with_keeper);
                         });
                     });
    }

    SupervisorOptions options_;
    boost::asio::io_context io_{1};
    Gpus gpus_;
    EventBus events_;
    BlockingQueue checks_{io_};    ///< checks of the next program, which may take seconds
    BlockingQueue blocking_{io_};  ///< declared after what its jobs use, so that it is joined first
    KeeperClient keeper_;
    std::optional<FleetContext> context_;
    std::optional<Fleet> fleet_;
    std::optional<Daemon> daemon_;
    std::optional<ControlServer> server_;
    DaemonFacts facts_;
    std::vector<FoundWorker> found_;  ///< until they are adopted
    /// When this supervisor started.
    Declarations declarations_;
    Admission::Known known_;    ///< until the fleet has it
    FormerLines former_lines_;  ///< until its models exist
    Deadline end_check_{io_};
    /// Wait for the reload under way.
    std::vector<std::function<void(const Reloaded&)>> reload_waiters_;
    enum class Phase : std::uint8_t {
        starting,  ///< before it has a fleet
        serving,
        handing_over,  ///< a successor takes over once no process is being spawned
        ending,
    };
    enum class Order : std::uint8_t { none, reload, stop };
    Phase phase_ = Phase::starting;
    Order early_order_ = Order::none;  ///< of the keeper, while starting; the highest counts
    int status_ = 0;
};

}  // namespace

int run_supervisor(SupervisorOptions options) { return Supervisor{std::move(options)}.run(); }

}  // namespace bulkhead::supervisor

#include <unistd.h>

#include "config/fleet_json.h"
#include "supervisor/base/json_members.h"
#include "supervisor/base/text.h"
#include "supervisor/control/methods.h"

namespace bulkhead::supervisor {
namespace {

void info(Daemon& daemon, rpc::Call call) {
    daemon.fleet.blanks().sample();
    read_gpus(daemon.fleet.context(), [&daemon, answer = std::move(call.answer)](const Result<std::vector<Gpu>>& gpus) {
        json::array gpu_list;
        if (gpus)
            for (const Gpu& gpu : *gpus)
                gpu_list.push_back(json::object{{"index", gpu.index},
                                                {"uuid", gpu.uuid},
                                                {"name", gpu.name},
                                                {"total_bytes", or_null(gpu.total_bytes)}});
        json::array models;
        for (const Model* model : daemon.fleet.all()) models.push_back(config::to_json(model->spec));
        const DaemonFacts& facts = daemon.facts;
        const FleetContext& context = daemon.fleet.context();
        answer(json::object{{"version", BULKHEAD_VERSION},
                            {"keeper_pid", facts.keeper.keeper_pid},
                            {"supervisor_pid", ::getpid()},
                            {"socket", facts.socket},
                            {"fleet", facts.fleet_file},
                            {"uptime_s", (unix_ms() - static_cast<std::int64_t>(facts.keeper.started_unix_ms)) / 1'000},
                            {"torch", or_null(context.torch)},
                            {"gpus", std::move(gpu_list)},
                            {"containment", facts.containment},
                            {"supervisor_starts", facts.keeper.supervisor_starts},
                            {"keeper_executions", facts.keeper.executions},
                            {"keeper_upgrade_failed", or_null(facts.keeper_upgrade_failed)},
                            {"blanks", daemon.fleet.blanks().status()},
                            {"adopted", context.adopted},
                            {"log_lines_lost", context.log_writer ? context.log_writer->lost() : std::uint64_t{0}},
                            {"fleet_error", or_null(facts.fleet_error)},
                            {"models", std::move(models)}});
    });
}

/// Answered from memory: clients use it to learn whether the daemon runs.
void ping(const Daemon&, const rpc::Call& call) {
    call.answer(json::object{{"supervisor_pid", ::getpid()}});
}

void stop(Daemon& daemon, rpc::Call call) {
    daemon.stop([answer = std::move(call.answer)](const std::vector<Receipt>& receipts) {
        answer(json::object{{"receipts", to_json(receipts)}});
    });
}

/// Workers, channels and graphs stay. The answer leaves before this supervisor ends.
void upgrade(const Daemon& daemon, rpc::Call call) {
    const bool with_keeper = rpc::flag(call.params, "keeper", true);
    daemon.upgrade(with_keeper, [&daemon, answer = std::move(call.answer)](const Result<>& checked) {
        if (!checked) return answer(checked.error());
        answer(json::object{{"supervisor_pid", ::getpid()},
                            {"supervisor_starts", daemon.facts.keeper.supervisor_starts}});
    });
}

}  // namespace

void add_daemon_methods(rpc::MethodTable& methods, Daemon& daemon) {
    rpc::add(methods, "daemon.info", {}, daemon, info);
    rpc::add(methods, "daemon.ping", {}, daemon, ping);
    rpc::add(methods, "daemon.upgrade", {"keeper"}, daemon, upgrade);
    rpc::add(methods, "daemon.stop", {}, daemon, stop);
}

}  // namespace bulkhead::supervisor

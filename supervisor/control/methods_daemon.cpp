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
        answer(rpc::Answer{
            {{"version", facts.version},
             {"keeper_pid", facts.keeper_pid},
             {"supervisor_pid", facts.supervisor_pid},
             {"socket", facts.socket},
             {"fleet", facts.fleet_file},
             {"uptime_s", (unix_ms() - facts.started_unix_ms) / 1'000},
             {"torch", or_null(daemon.fleet.context().torch)},
             {"gpus", std::move(gpu_list)},
             {"containment", facts.containment},
             {"supervisor_starts", facts.supervisor_starts},
             {"keeper_executions", facts.keeper_executions},
             {"keeper_upgrade_failed", or_null(facts.keeper_upgrade_failed)},
             {"blanks", daemon.fleet.blanks().status()},
             {"adopted", daemon.fleet.context().adopted},
             {"log_lines_lost",
              daemon.fleet.context().log_writer ? daemon.fleet.context().log_writer->lost() : std::uint64_t{0}},
             {"fleet_error", or_null(facts.fleet_error)},
             {"models", std::move(models)}},
            {}});
    });
}

/// Answered from memory: clients use it to learn whether the daemon runs.
void ping(const Daemon& daemon, const rpc::Call& call) {
    call.answer(rpc::Answer{{{"supervisor_pid", daemon.facts.supervisor_pid}}, {}});
}

void stop(Daemon& daemon, rpc::Call call) {
    daemon.stop([answer = std::move(call.answer)](const std::vector<Receipt>& receipts) {
        answer(rpc::Answer{{{"receipts", to_json(receipts)}}, {}});
    });
}

/// Workers, channels and graphs stay. The answer leaves before this supervisor ends.
void upgrade(const Daemon& daemon, rpc::Call call) {
    const bool with_keeper = rpc::flag(call.params, "keeper", true);
    daemon.upgrade(with_keeper, [&daemon, answer = std::move(call.answer)](const Result<>& checked) {
        if (!checked) return answer(checked.error());
        answer(rpc::Answer{
            {{"supervisor_pid", daemon.facts.supervisor_pid}, {"supervisor_starts", daemon.facts.supervisor_starts}},
            {}});
    });
}

}  // namespace

void add_daemon_methods(rpc::MethodTable& methods, Daemon& daemon) {
    methods["daemon.info"] = rpc::method({}, [&daemon](rpc::Call call) { info(daemon, std::move(call)); });
    methods["daemon.ping"] = rpc::method({}, [&daemon](const rpc::Call& call) { ping(daemon, call); });
    methods["daemon.upgrade"] =
        rpc::method({"keeper"}, [&daemon](rpc::Call call) { upgrade(daemon, std::move(call)); });
    methods["daemon.stop"] = rpc::method({}, [&daemon](rpc::Call call) { stop(daemon, std::move(call)); });
}

}  // namespace bulkhead::supervisor

#include "supervisor/control/methods.h"

#include <unistd.h>

#include <algorithm>

#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include "config/fleet_json.h"
#include "supervisor/base/json_members.h"
#include "supervisor/base/limits.h"
#include "supervisor/base/text.h"

namespace bulkhead::supervisor {
namespace {

// --- what several of them share

/// {"model": …}. Throws  ErrorException: input_invalid, model_unknown
Model& selected_model(const json::object& params, const Fleet& fleet) {
    return *fleet.find(rpc::required_string(params, "model")).value();
}

/// {"model": …}, {"models": […]} or {"all": true}, exactly one of them. Throws  as `selected_model`
Fleet::Models selected_models(const json::object& params, const Fleet& fleet) {
    const bool all = rpc::flag(params, "all");
    const auto named = rpc::optional_strings(params, "models");
    const int ways = (all ? 1 : 0) + (named ? 1 : 0) + (params.contains("model") ? 1 : 0);
    if (ways != 1)
        throw ErrorException{{ErrorCode::input_invalid, fmt::format("naming models in {} ways", ways),
                              R"(give one of {"model": "A"}, {"models": ["A", "B"]}, {"all": true})"}};
    if (all) return fleet.all();
    if (!named) return {&selected_model(params, fleet)};
    Fleet::Models models;
    for (const auto& name : *named) models.push_back(fleet.find(name).value());
    return models;
}

/// Throws  ErrorException: input_invalid, memory is not planned for this model
void require_plan(const Fleet& fleet, const std::string& model) {
    if (fleet.admission().plans(model)) return;
    throw ErrorException{{ErrorCode::input_invalid,
                          fmt::format("model {} starts when it is asked to: its device has no limit", model),
                          "declare `limits` in the fleet file, and reload"}};
}

/// `deadline_ms`: how long the caller will wait. Throws  ErrorException: input_invalid
std::optional<std::chrono::milliseconds> selected_deadline(const json::object& params) {
    constexpr std::uint64_t day_ms = 86'400'000;
    const auto ms = rpc::optional_count(params, "deadline_ms", day_ms);
    return ms ? std::optional{std::chrono::milliseconds{*ms}} : std::nullopt;
}

json::array to_json(const std::vector<Receipt>& receipts) {
    json::array array;
    for (const Receipt& receipt : receipts) array.push_back(to_json(receipt));
    return array;
}

json::array to_json(const std::vector<LoadedReplica>& loaded) {
    json::array array;
    for (const LoadedReplica& one : loaded)
        array.push_back(json::object{{"model", one.worker.model},
                                     {"replica", one.worker.replica},
                                     {"state", to_string(one.state)},
                                     {"pid", one.pid},
                                     {"ms", one.ms}});
    return array;
}

/// Passes `state` of all GPUs, or why there are none, to `done` on the loop.
void read_gpus(FleetContext& context, std::function<void(Result<std::vector<Gpu>>)> done) {
    context.blocking.run_for_client(
        "reading the GPUs", [&gpus = context.gpus] { return gpus.read(); }, std::move(done));
}

// --- fleet.*

constexpr std::uint64_t bytes_max = std::uint64_t{1} << 40;

void status(Fleet& fleet, rpc::Call call) {
    fleet.status([answer = std::move(call.answer)](json::array rows) {
        answer(json::object{{"models", std::move(rows)}});
    });
}

rpc::Answer refusal(const std::string& file, const std::vector<config::Diagnostic>& errors) {
    rpc::Answer answer{{{"errors", config::to_json(errors)}}};
    answer.error = Error{ErrorCode::config_invalid,
                         fmt::format("reloading {}: {}{}", file, errors.front().text(),
                                     errors.size() > 1 ? fmt::format(", and {} more", errors.size() - 1) : ""),
                         "correct the file and reload again; until then the fleet stays as it was"};
    return answer;
}

void reload(const Daemon& daemon, rpc::Call call) {
    daemon.reload([answer = std::move(call.answer), file = daemon.facts.fleet_file](const Reloaded& reloaded) {
        if (!reloaded.errors.empty()) return answer(refusal(file, reloaded.errors));
        if (reloaded.refused) return answer(*reloaded.refused);
        const FleetChange& change = reloaded.change;
        answer(json::object{{"added", json::value_from(change.added)},
                            {"removed", json::value_from(change.removed)},
                            {"changed", json::value_from(change.changed)},
                            {"unchanged", json::value_from(change.unchanged)}});
    });
}

void plan(const Fleet& fleet, const rpc::Call& call) {
    const std::string& name = selected_model(call.params, fleet).spec.name;
    require_plan(fleet, name);
    call.answer(fleet.admission().plan(name));
}

void reclaim(Fleet& fleet, rpc::Call call) {
    const std::string device = rpc::required_string(call.params, "device");
    const std::string client = rpc::required_string(call.params, "client");
    const auto bytes = rpc::optional_count(call.params, "bytes", bytes_max);
    if (!bytes)
        throw ErrorException{
            {ErrorCode::input_invalid, "parameter \"bytes\" is missing", "say how much room is needed"}};
    const auto deadline = selected_deadline(call.params);
    auto answer = rpc::answer_of<Admission::MadeRoom>(call, [](const Admission::MadeRoom& made) {
        return json::object{{"freed", made.freed}, {"receipts", to_json(made.receipts)}, {"short_of", made.short_of}};
    });
    const auto ticket = fleet.admission().make_room(device, *bytes, client, deadline, std::move(answer));
    *call.client_left = [&fleet, ticket] { fleet.admission().leave(ticket); };
}

void ledger(Fleet& fleet, const rpc::Call& call) {
    fleet.blanks().sample();  // for the next call
    call.answer(json::object{{"devices", fleet.admission().ledger()},
                             {"blanks_on_host", fleet.blanks().bytes(std::string{memory::host})}});
}

// --- model.*, channel.open

/// The limit in the channel's hello.
constexpr std::size_t client_name_bytes_max = 47;

void load(Fleet& fleet, rpc::Call call) {
    const Fleet::Models models = selected_models(call.params, fleet);
    const auto deadline = selected_deadline(call.params);
    // A repeated load shares the one under way: `again` changes nothing.
    (void)rpc::flag(call.params, "again");
    auto answer = rpc::answer_of<std::vector<LoadedReplica>>(call, [](const auto& loaded) {
        return json::object{{"models", to_json(loaded)}};
    });
    fleet.load(models, deadline, std::move(answer), call.client_left.get(), call.peer.connection);
}

void pin(Fleet& fleet, const rpc::Call& call) {
    const std::string& name = selected_model(call.params, fleet).spec.name;
    const bool shall = rpc::flag(call.params, "pin", true);
    require_plan(fleet, name);
    fleet.admission().pin(name, shall);
    call.answer(json::object{{"model", name}, {"pin", shall}});
}

void unload(Fleet& fleet, rpc::Call call) {
    const Fleet::Models models = selected_models(call.params, fleet);
    const bool again = rpc::flag(call.params, "again");
    auto answer = rpc::answer_of<std::vector<Receipt>>(call, [](const auto& receipts) {
        return json::object{{"receipts", to_json(receipts)}};
    });
    fleet.unload(models, std::move(answer), again);
}

void restart(Fleet& fleet, rpc::Call call) {
    const Fleet::Models models = selected_models(call.params, fleet);
    auto answer = rpc::answer_of<Fleet::Restarted>(call, [](const Fleet::Restarted& restarted) {
        return json::object{{"models", to_json(restarted.loaded)}, {"receipts", to_json(restarted.receipts)}};
    });
    fleet.restart(models, std::move(answer), call.peer.connection);
}

/// `why` is asked about trouble: the first replica that does not serve speaks for the model.
const Replica& spokesman(const Model& model) {
    const auto troubled =
        std::ranges::find_if(model.replicas, [](const auto& replica) { return !is_serving(replica->state()); });
    return troubled == model.replicas.end() ? *model.replicas.front() : **troubled;
}

json::object why_of(const Fleet& fleet, const Model& model) {
    const std::string& name = model.spec.name;
    json::array replicas;
    for (const auto& replica : model.replicas) replicas.push_back(replica->why());
    const Replica& speaks = spokesman(model);
    std::string sentence = speaks.sentence();
    if (const std::string memory = fleet.admission().why(name); !memory.empty())
        sentence += fmt::format(" Memory: {}.", memory);
    return {{"model", name},
            {"state", to_string(speaks.state())},
            {"sentence", std::move(sentence)},
            {"memory", fleet.admission().footprint(speaks)},
            {"replicas", std::move(replicas)},
            {"graphs", speaks.graphs()},
            {"generate", speaks.generate()}};
}

void why(Fleet& fleet, const rpc::Call& call) {
    const Model& model = selected_model(call.params, fleet);
    const bool works = std::ranges::any_of(model.replicas, [](const auto& replica) {
        return replica->state() == WorkerState::busy || !replica->generate().is_null();
    });
    if (!works) return call.answer(why_of(fleet, model));
    // First refresh the counts that change with each request or token, as `fleet.status` does.
    fleet.status([&fleet, name = model.spec.name, answer = call.answer](const json::array&) {
        const auto still = fleet.find(name);
        if (!still) return answer(still.error());
        answer(why_of(fleet, **still));
    });
}

void open(Fleet& fleet, rpc::Call call) {
    const std::string client = rpc::required_string(call.params, "client");
    if (client.empty() || client.size() > client_name_bytes_max || !is_printable(client))
        throw ErrorException{{ErrorCode::input_invalid, fmt::format("parameter \"client\" has {} bytes", client.size()),
                              fmt::format("give a printable name of 1 to {} bytes", client_name_bytes_max)}};
    const auto deadline = selected_deadline(call.params);
    Model& model = selected_model(call.params, fleet);
    const bool stateful = model.spec.state != config::StateScope::none;
    auto answer = rpc::answer_of<OpenedChannel>(call, [stateful](OpenedChannel opened) {
        rpc::Answer told{{{"fds", 1},
                          {"channel", opened.id},
                          {"model", opened.worker.model},
                          {"replica", opened.worker.replica},
                          {"generation", opened.worker.generation},
                          {"pid", opened.pid},
                          {"stateful", stateful}}};
        told.fd = std::move(opened.client_end);
        return told;
    });
    fleet.open_channel(model, {client, call.peer.pid, call.peer.uid, call.peer.connection}, deadline, std::move(answer),
                       call.client_left.get());
}

// --- events.subscribe, logs.tail, crashes.list

void subscribe(Fleet& fleet, const rpc::Call& call) {
    std::set<std::string> models;
    for (const auto& name : rpc::optional_strings(call.params, "models").value_or(std::vector<std::string>{}))
        models.insert(fleet.find(name).value()->spec.name);
    const auto sink = call.sink.lock();
    if (!sink) return;
    sink->subscribed();
    call.answer(json::object{{"subscribed", true}});  // before the first event
    fleet.context().events.subscribe(sink, std::move(models));
}

void tail(Fleet& fleet, const rpc::Call& call) {
    const auto lines = rpc::optional_count(call.params, "lines", limits::log_lines_kept);
    const bool follow = rpc::flag(call.params, "follow");
    ModelLog& log = selected_model(call.params, fleet).log;
    const auto sink = call.sink.lock();
    if (follow && sink) sink->subscribed();
    call.answer(json::object{{"lines", log.tail(lines.value_or(limits::log_tail_default))}});
    if (follow && sink) log.follow(sink);
}

json::value to_json(const CrashReports::Lost& lost) {
    if (lost.count == 0) return nullptr;
    return json::object{{"count", lost.count}, {"time", lost.time_ms}, {"reason", lost.reason}};
}

/// Accepts any name: a model that has left the fleet file may still have reports.
void list(Fleet& fleet, rpc::Call call) {
    const std::string model = call.params.contains("model") ? rpc::required_string(call.params, "model") : "";
    const auto max = rpc::optional_count(call.params, "limit", limits::crash_reports_max);
    FleetContext& context = fleet.context();
    context.blocking.run_for_client(
        "reading the crash reports",
        [reports = context.crash_reports, model, max = max.value_or(limits::crash_list_default)] {
            return reports->list(model, max);
        },
        rpc::answer_of<json::array>(call, [reports = context.crash_reports](json::array crashes) {
            return json::object{{"crashes", std::move(crashes)}, {"lost", to_json(reports->lost())}};
        }));
}

// --- gpu.*

json::object to_json(const Gpu& gpu, const std::optional<std::string>& quarantined) {
    json::array processes;
    for (const GpuProcess& process : gpu.processes)
        processes.push_back(json::object{{"pid", process.pid}, {"bytes", or_null(process.bytes)}});
    const GpuSensors& sensors = gpu.sensors;
    json::array throttled;
    for (const std::string_view reason : sensors.throttled) throttled.emplace_back(reason);
    const json::value power = sensors.power_mw ? json::value(*sensors.power_mw / 1000.0) : json::value(nullptr);
    return {{"index", gpu.index},
            {"uuid", gpu.uuid},
            {"name", gpu.name},
            {"state", gpu.trouble.empty() ? "ok" : gpu.trouble},
            {"quarantined", or_null(quarantined)},
            {"total_bytes", or_null(gpu.total_bytes)},
            {"free_bytes", or_null(gpu.free_bytes)},
            {"clock_mhz", or_null(sensors.clock_mhz)},
            {"power_w", power},
            {"temperature_c", or_null(sensors.temperature_c)},
            {"utilization_percent", or_null(sensors.utilization_percent)},
            {"throttled", std::move(throttled)},
            {"processes", gpu.processes_known ? json::value(std::move(processes)) : json::value(nullptr)}};
}

void gpu_status(Fleet& fleet, rpc::Call call) {
    read_gpus(fleet.context(), [&fleet, answer = std::move(call.answer)](Result<std::vector<Gpu>> gpus) {
        if (!gpus && gpus.error().code == ErrorCode::queue_full) return answer(gpus.error());
        json::object result{{"nvml", gpus.has_value()}};
        if (!gpus) result["reason"] = gpus.error().attempt;
        json::array list;
        if (gpus)
            for (const Gpu& gpu : *gpus) list.push_back(to_json(gpu, fleet.context().gpu_quarantine.reason(gpu.uuid)));
        result["gpus"] = std::move(list);
        answer(std::move(result));
    });
}

/// Works even if NVML does not answer or no longer sees the GPU.
void lift(Fleet& fleet, rpc::Call call) {
    const std::string uuid = rpc::required_string(call.params, "uuid");
    FleetContext& context = fleet.context();
    if (const auto reason = context.gpu_quarantine.reason(uuid)) {
        context.gpu_quarantine.lift(uuid);
        spdlog::info("gpu={} quarantine lifted by a person; it was: {}", uuid, escaped(*reason));
        return call.answer(json::object{{"uuid", uuid}, {"was", *reason}});
    }
    read_gpus(context, [uuid, answer = std::move(call.answer)](const Result<std::vector<Gpu>>& gpus) {
        const std::string attempt = fmt::format("lifting the quarantine of GPU {}", in_quotes(uuid));
        std::string known;
        if (gpus) {
            for (const Gpu& gpu : *gpus) {
                if (gpu.uuid == uuid)
                    return answer(Error{ErrorCode::input_invalid, attempt + ": it is not quarantined", {}});
                known += (known.empty() ? "" : ", ") + gpu.uuid;
            }
        }
        answer(Error{ErrorCode::input_invalid, attempt + ": there is no such GPU",
                     known.empty() ? "`bulkhead gpus` names those there are" : "there is " + known});
    });
}

// --- daemon.*

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
void ping(const Daemon&, const rpc::Call& call) { call.answer(json::object{{"supervisor_pid", ::getpid()}}); }

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
        answer(
            json::object{{"supervisor_pid", ::getpid()}, {"supervisor_starts", daemon.facts.keeper.supervisor_starts}});
    });
}

}  // namespace

rpc::MethodTable make_methods(Daemon& daemon) {
    rpc::MethodTable methods;
    const auto add = [&](const char* name, std::initializer_list<std::string_view> parameters, auto& subject,
                         auto run) {
        methods[name] = rpc::method(parameters, [&subject, run](rpc::Call call) { run(subject, std::move(call)); });
    };
    Fleet& fleet = daemon.fleet;
    add("fleet.status", {}, fleet, status);
    add("fleet.reload", {}, daemon, reload);
    add("fleet.plan", {"model"}, fleet, plan);
    add("fleet.reclaim", {"device", "bytes", "client", "deadline_ms"}, fleet, reclaim);
    add("fleet.memory", {}, fleet, ledger);
    add("model.load", {"model", "models", "all", "deadline_ms", "again"}, fleet, load);
    add("model.unload", {"model", "models", "all", "again"}, fleet, unload);
    add("model.restart", {"model", "models", "all"}, fleet, restart);
    add("model.pin", {"model", "pin"}, fleet, pin);
    add("model.why", {"model"}, fleet, why);
    add("channel.open", {"model", "client", "deadline_ms"}, fleet, open);
    add("events.subscribe", {"models"}, fleet, subscribe);
    add("logs.tail", {"model", "lines", "follow"}, fleet, tail);
    add("crashes.list", {"model", "limit"}, fleet, list);
    add("gpu.status", {}, fleet, gpu_status);
    add("gpu.lift", {"uuid"}, fleet, lift);
    add("daemon.info", {}, daemon, info);
    add("daemon.ping", {}, daemon, ping);
    add("daemon.upgrade", {"keeper"}, daemon, upgrade);
    add("daemon.stop", {}, daemon, stop);
    return methods;
}

}  // namespace bulkhead::supervisor

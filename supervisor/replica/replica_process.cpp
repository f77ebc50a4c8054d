/// A replica's process, and what it says on its link.

#include <algorithm>
#include <iterator>

#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include "ipc/base/packet.h"
#include "ipc/channel/channel_codec.h"
#include "supervisor/base/json_members.h"
#include "supervisor/base/limits.h"
#include "supervisor/base/proc_files.h"
#include "supervisor/base/text.h"
#include "supervisor/replica/replica.h"

namespace bulkhead::supervisor {
namespace {

/// How often a thread of a model that generates looks for the next parallel region before it sleeps: some 0.6 ms, which
/// bridges what lies between two steps and not what lies between two requests (docs/decisions.md).
constexpr const char* generating_spins = "20000";

/// What the model declares, and how its threads wait where it does not say.
std::map<std::string, std::string> environment_of(const config::ModelSpec& spec) {
    auto declared = spec.environment;
    if (spec.runtime == config::Runtime::generate && !declared.contains("OMP_WAIT_POLICY"))
        declared.try_emplace("GOMP_SPINCOUNT", generating_spins);
    return declared;
}

struct MessageAnswer {
    std::string_view type;
    std::string_view in_state;  ///< a character for each WorkerState: '+' taken, '!' complained about, '.' ignored
};

// clang-format off
/// Every message of the worker link, in the order of worker_link::Message, in every state: stopped, adopting, spawning,
/// loading, capturing, ready, busy, draining, stopping, reclaiming, crashed, backoff, quarantined. What a worker says
/// while it is adopted, before its hello, may be older than that: only what is final is taken.
constexpr MessageAnswer message_answers[] = {
    //                   saslcrbdsrcbq
    {"hello",           ".++!!!!!!!!.."},
    {"progress",        "...++........"},
    {"grant_asked",     "..+++!!!!!!.."},
    {"ready",           ".+!++!!!!!!.."},
    {"failed",          ".++++........"},
    {"channel_opened",  "..+++++++++.."},
    {"channel_closed",  "..+++++++++.."},
    {"channel_refused", "..+++++++++.."},
    {"busy",            ".....+......."},
    {"idle",            "......+......"},
    {"statistics",      ".++++++++++.."},
    {"overrun",         ".+++++++....."},
    {"drained",         ".+!!!!!+!!!.."},
    {"dying",           ".++++++++++.."},
    {"backtrace",       ".++++++++++.."},
    {"unknown",         "..+++++++++.."},
};
// clang-format on
static_assert(std::size(message_answers) == std::variant_size_v<worker_link::Message>);
static_assert(std::ranges::all_of(message_answers, [](const MessageAnswer& one) {
    return one.in_state.size() == worker_state_count && one.in_state.find_first_not_of("+!.") == std::string_view::npos;
}));

/// Whether a message is taken only where the transition that it causes exists: else a worker could end the supervisor.
constexpr bool fits(std::string_view type, WorkerEvent event) {
    const auto* const answer = std::ranges::find(message_answers, type, &MessageAnswer::type);
    for (std::size_t state = 0; state < worker_state_count; ++state)
        if (answer->in_state[state] == '+' && !next(static_cast<WorkerState>(state), event)) return false;
    return true;
}
static_assert(fits("busy", WorkerEvent::became_busy) && fits("idle", WorkerEvent::became_idle));
static_assert(fits("ready", WorkerEvent::became_ready) && fits("drained", WorkerEvent::stop_asked));
static_assert(fits("overrun", WorkerEvent::lost) && fits("failed", WorkerEvent::lost));

}  // namespace

using Clock = Deadline::Clock;

void Replica::start(std::string cause) {
    const bool is_restart = state_ == WorkerState::backoff;
    if (is_restart) ++restarts_;
    process_ = std::make_shared<WorkerProcess>();
    process_->is_restart = is_restart;
    // The keeper demands spawns in the order of generations. The off-loop thread keeps that order, and a replica whose
    // device is known waits behind those whose device is being looked for.
    process_->name = {spec_.name, index_, generation_ = ++context_.generation_last};
    transition(WorkerEvent::spawn_asked, std::move(cause));
    process_->progressed_at = Clock::now();
    begin_load_budget();
    declaration_.clear();
    context_.off_loop.run(
        fmt::format("loading {}: looking at {}", name().place(), spec_.file.string()),
        [spec = spec_] { return fingerprint(spec); },
        [this, process = std::weak_ptr{process_}](Result<std::string> declaration) {
            if (!is_present(process)) return;
            declaration ? on_declaration_known(std::move(*declaration)) : on_file_unanswered(declaration.error());
        });
    auto known = std::exchange(same_device_, std::nullopt);
    if (spec_.device == "cpu") known = Device{};
    if (known && context_.placing == 0) return on_placed(*known);
    ++context_.placing;
    context_.off_loop.run(
        fmt::format("placing it on device \"{}\"", spec_.device),
        // A GPU that is declared by name is found even if it is quarantined, then refused with the reason.
        [&gpus = context_.gpus, declared = spec_.device, known,
         quarantined = spec_.device == "auto" ? context_.gpu_quarantine.all()
                                              : std::map<std::string, std::string>{}]() -> Result<Device> {
            if (known) return *known;
            return place(gpus, declared, quarantined);
        },
        [this, &context = context_, process = std::weak_ptr{process_}](const Result<Device>& device) {
            --context.placing;
            if (!process.expired()) on_placed(device);
        });
}

void Replica::on_placed(const Result<Device>& device) {
    if (state_ != WorkerState::spawning)
        return without_process(
            process_->failure.value_or(Error{ErrorCode::cancelled, "it was not started: an unload came first", {}}));
    if (!device) {
        process_->gpu_refused = device.error().code == ErrorCode::resources_exhausted;
        return without_process(Error{device.error()}.during("loading " + name().place()));
    }
    process_->device = *device;
    device_text_ = device->text;
    if (auto may = refuse_quarantined_gpu(); !may) {
        process_->gpu_refused = true;
        return without_process(std::move(may.error()));
    }

    auto command = context_.launch.command(spec_);
    if (!command) return without_process(std::move(command.error()));
    SpawnRequest request;
    request.name = name();
    request.argv = std::move(*command);
    request.environment = context_.launch.environment(name(), device->uuid, environment_of(spec_));
    request.core_bytes_max = spec_.core_bytes_max;
    std::size_t bytes = 0;
    for (const auto& text : request.argv) bytes += text.size() + 1;
    for (const auto& text : request.environment) bytes += text.size() + 1;
    if (bytes > keeper_link::spawn_bytes_max)
        return without_process({ErrorCode::config_invalid,
                                fmt::format("starting {}: its environment has {}", name().place(), bytes_text(bytes)),
                                fmt::format("declare less than {}", bytes_text(keeper_link::spawn_bytes_max))});
    if (context_.cgroups) {
        if (auto folder = context_.cgroups->add(name()))
            request.cgroup = std::move(*folder);
        else
            spdlog::warn("worker={} is contained by its process group and marker alone: {}", name().text(),
                         folder.error().text());
    }
    process_->has_cgroup = static_cast<bool>(request.cgroup);
    context_.keeper.spawn(
        std::move(request),
        [this, process = process_](Result<SpawnedProcess> spawned) { on_spawned(process, std::move(spawned)); },
        [this, process = std::weak_ptr{process_}](const ProcessExit& exit) {
            if (is_present(process)) on_exited(exit);
        });
}

void Replica::on_spawned(const std::shared_ptr<WorkerProcess>& process, Result<SpawnedProcess> spawned) {
    if (!spawned) return without_process(std::move(spawned.error()));
    process->pid = spawned->pid;
    process->pidfd = std::move(spawned->pidfd);
    process->log = LogPipe::open(context_.io, std::move(spawned->log), process->name, log_);
    CrashEvidence::note_oom_kills(context_.off_loop, std::shared_ptr<CrashEvidence>{process, &process->evidence});
    open_link(std::move(spawned->link));
    begin_record();
    if (!is_live(state_)) escalate();  // it was given up on the way
}

void Replica::open_link(UniqueFd link) {
    process_->link = PacketLink::make(context_.io, std::move(link));
    process_->link->start([this](Packet& packet) { on_packet(packet); },
                          [this](const Error* why) { on_link_closed(why); });
}

void Replica::on_packet(Packet& packet) {
    const std::string_view text{reinterpret_cast<const char*>(packet.bytes.data()), packet.bytes.size()};
    auto message = worker_link::parse(text);
    if (!message) return complain(message.error().attempt);
    if (auto* hello = std::get_if<worker_link::Hello>(&*message)) hello->fds = std::move(packet.fds);
    const auto& [type, answers] = message_answers[message->index()];
    switch (answers[static_cast<std::size_t>(state_)]) {
    case '+': return std::visit([this](auto& value) { on_message(value); }, *message);
    case '!': return complain(fmt::format("{}, while it was {}", type, to_string(state_)));
    default: return;
    }
}

void Replica::complain(const std::string& what) {
    if (++process_->complaints <= limits::link_complaints_max)
        spdlog::warn("worker={} pid={} said what is ignored: {}", name().text(), process_->pid, escaped(what));
}

void Replica::on_message(worker_link::Hello& message) {
    if (state_ == WorkerState::adopting) return on_adoption_hello(message);
    auto configuration = configuration_for(message);
    if (!configuration) {
        fail(configuration.error());
        return kill();
    }
    take_page(message);
    transition(WorkerEvent::said_hello, "its process said hello");
    arm_load_deadline();
    // The file is looked at before the worker may read it. Were it looked at later, a file that was replaced meanwhile
    // would count as the one that the process has.
    if (declaration_.empty())
        process_->configuration = std::move(*configuration);
    else
        process_->send(std::move(*configuration));
}

void Replica::on_declaration_known(std::string declaration) {
    declaration_ = std::move(declaration);
    remember();
    if (!process_->configuration.empty()) process_->send(std::exchange(process_->configuration, {}));
}

/// The worker would hang on it as well.
void Replica::on_file_unanswered(const Error& error) {
    if (!is_live(state_)) return;
    fail(error);
    if (process_->pid != 0) kill();
}

Result<std::string> Replica::configuration_for(const worker_link::Hello& hello) const {
    if (hello.name != process_->name)
        return Error{ErrorCode::protocol_violation,
                     fmt::format("{} calls itself {}", name().text(), escaped(hello.name.text())),
                     "let only bulkheadd start workers"};
    if (hello.protocol_min > worker_link::version_max || hello.protocol_max < worker_link::version_min)
        return Error{ErrorCode::protocol_violation,
                     fmt::format("{} speaks versions {} to {} of the worker link, this daemon {} to {}", name().place(),
                                 hello.protocol_min, hello.protocol_max, worker_link::version_min,
                                 worker_link::version_max),
                     "install one release of all programs"};
    config::ModelSpec spec = spec_;
    if (!eager_reason_.empty()) spec.graphs = config::Graphs::off;
    std::string configure = worker_link::configure(spec, process_->device.is_gpu());
    if (configure.size() > packet_bytes_max)
        return Error{ErrorCode::config_invalid,
                     fmt::format("the declaration of {} has {} as JSON", spec_.name, bytes_text(configure.size())),
                     fmt::format("declare fewer methods or buckets: {} is the most", bytes_text(packet_bytes_max))};
    return configure;
}

void Replica::on_message(worker_link::Progress& message) {
    const bool captures = message.phase == "capturing" && can(WorkerEvent::capture_began);
    if (captures) transition(WorkerEvent::capture_began, "warmed up");
    if (captures || message.phase != process_->progress.phase || message.done > process_->progress.done) {
        process_->progressed_at = Clock::now();
        begin_load_budget();
    }
    const bool is_new_phase = message.phase != process_->progress.phase;
    const bool is_end_of_phase = message.done == message.total && message.done > process_->progress.done;
    const bool is_news =
        is_new_phase || is_end_of_phase || Clock::now() - process_->progress_told_at >= limits::progress_interval;
    if (is_new_phase) tell_progress();  // how far the former phase came
    process_->progress = std::move(message);
    process_->progress_is_told = false;
    if (is_news) tell_progress();
}

void Replica::tell_progress() {
    const auto& now = process_->progress;
    if (now.phase.empty() || std::exchange(process_->progress_is_told, true)) return;
    process_->progress_told_at = Clock::now();
    context_.events.publish(
        "progress", name(),
        {{"phase", now.phase}, {"done", now.done}, {"total", now.total}, {"unit", now.unit}, {"detail", now.detail}});
}

void Replica::on_message(const worker_link::GrantAsked& /*message*/) {
    if (process_->turn || process_->grant == Grant::awaited || process_->grant == Grant::owed)
        return complain("grant_asked, a second time");
    if (!process_->device.is_gpu()) return process_->send(worker_link::grant());
    process_->grant = Grant::awaited;
    process_->load_budget.pause(Clock::now());
    deadline_.cancel();
    context_.gpu_mutex(process_->device.uuid).wait([this, process = std::weak_ptr{process_}](AsyncMutex::Lock turn) {
        if (!is_present(process) || !is_loading(state_)) return;
        process_->turn = std::move(turn);
        process_->load_budget.resume(Clock::now());
        arm_load_deadline();
        process_->grant = Grant::given;
        remember();
        process_->send(worker_link::grant());
    });
}

void Replica::on_message(worker_link::Ready& message) {
    if (state_ != WorkerState::adopting) return become_ready(message);
    if (process_->ready_at) return;
    process_->ready_at = Clock::now();  // if it dies before it is adopted, it dies as one that had been ready
    policy_.became_ready();
}

void Replica::become_ready(worker_link::Ready& message) {
    process_->statistics.graphs = std::move(message.graphs);
    process_->ready_at = Clock::now();
    process_->turn = {};
    if (!message.torch.empty()) context_.torch = message.torch;
    policy_.became_ready();
    transition(
        WorkerEvent::became_ready,
        fmt::format("loaded in {} on {}", duration_text(static_cast<std::int64_t>(message.load_ms)), device_text_));
    // Of one that is asked to end, they wait for the next process.
    if (!is_asked_to_end()) load_waiters_.answer({name(), state_, process_->pid, 0});
    sample_memory([] {});
}

void Replica::on_message(const worker_link::ChannelOpened& message) {
    spdlog::debug("worker={} channel={} answered its client", name().text(), message.channel);
}

void Replica::on_message(const worker_link::ChannelRefused& message) {
    spdlog::info("worker={} channel={} refused: {}", name().text(), message.channel, message.error.text());
    // A worker that ran out of descriptors never had its end: its client is told on the one kept here.
    if (const auto end = process_->channels.find(message.channel); end != process_->channels.end()) {
        (void)send_packet(end->second.get(), channel::encode(channel::Failure{0, message.error}));
        process_->channels.erase(end);
    }
}

void Replica::on_message(worker_link::Statistics& message) {
    process_->statistics = std::move(message);
    process_->statistics_asked = false;
    watch_.answered();
    arm_watch();
    statistics_are_known();
}

void Replica::on_message(const worker_link::Overrun& message) {
    hang(fmt::format("{} ran {}, budget {}", message.method,
                     duration_text(static_cast<std::int64_t>(message.running_ms)),
                     duration_text(static_cast<std::int64_t>(message.budget_ms))),
         fmt::format("raise deadlines.request of {}, or look for an endless loop", spec_.name));
}

void Replica::on_message(const worker_link::Drained& /*message*/) {
    if (!process_->drain_until) process_->drain_until = Clock::now();
    transition(WorkerEvent::stop_asked, "drained");
    escalate_after(spec_.deadlines.kill);
}

void Replica::on_message(const worker_link::Dying& message) {
    process_->evidence.report.signal = message.signal;
    if (!is_live(state_)) return process_->cut_channels();
    lose(FirstSign::dying, fmt::format("dying of {}", signal_name(message.signal)));
    // It ends by itself, after its backtrace and its core file, if it may write one: not later than this.
    if (process_->escalation < Escalation::sigkill)
        escalate_after(spec_.core_bytes_max > 0 ? limits::core_dump_deadline : limits::dying_deadline);
}

void Replica::on_message(worker_link::Backtrace& message) {
    if (!process_->evidence.take(std::move(message))) complain("a second backtrace");
}

void Replica::on_message(const worker_link::Unknown& message) {
    complain(fmt::format("a packet of type \"{}\"", message.type));
}

/// What else came along stays in the message.
void Replica::take_page(worker_link::Hello& hello) {
    if (!hello.has_page || hello.fds.empty()) return;
    if (process_->page) return (void)hello.fds.erase(hello.fds.begin());  // it is the same one
    const UniqueFd memfd = std::move(hello.fds.front());
    hello.fds.erase(hello.fds.begin());
    auto page = WorkerPageView::map(memfd);
    if (!page) return complain(page.error().text());
    process_->page = std::move(*page);
    process_->alive_watch = context_.alive->watch(process_->page, [this, process = std::weak_ptr{process_}] {
        if (is_present(process)) on_main_thread_ended();
    });
}

/// The first sign of most deaths: the kernel has not yet freed its memory and closed its sockets.
void Replica::on_main_thread_ended() {
    process_->link->receive_waiting();  // its last words come first: drained, failed, dying
    process_->cut_channels();
    // A draining process may end as it was asked to: its exit decides.
    if (is_live(state_) && state_ != WorkerState::draining) lose(FirstSign::end, main_thread_ended);
}

void Replica::sample_memory(std::function<void()> sampled) {
    struct Sample {
        std::optional<std::uint64_t> host_bytes;
        std::optional<GpuShare> gpu;
    };
    if (!process_ || process_->pid == 0) return sampled();
    context_.off_loop.run(
        "reading the memory of " + name().text(),
        [pid = process_->pid, marker = context_.launch.marker(process_->name), uuid = process_->device.uuid,
         &gpus = context_.gpus] {
            const auto gpu = uuid.empty() ? std::nullopt : gpus.read(uuid);
            return Sample{read_host_bytes(pid), gpu ? std::optional{share_of(*gpu, pid, marker)} : std::nullopt};
        },
        [weak = std::weak_ptr{process_}, sampled = std::move(sampled)](const Result<Sample>& sample) {
            const auto process = weak.lock();
            // A process that was reaped meanwhile keeps its last sample: the number may be another's by now.
            const bool counts = sample && process && !process->exit;
            if (counts && sample->host_bytes) process->memory.host_bytes = sample->host_bytes;
            if (counts && sample->gpu) process->memory.take(*sample->gpu, process->end_began.has_value());
            sampled();
        });
}

}  // namespace bulkhead::supervisor

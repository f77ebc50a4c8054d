#include "supervisor/replica/worker_process.h"

#include <sys/socket.h>

#include <algorithm>
#include <utility>

#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include "ipc/base/packet.h"
#include "ipc/base/pidfd.h"
#include "ipc/channel/channel_codec.h"
#include "ipc/slab/host_slab.h"
#include "supervisor/base/limits.h"
#include "supervisor/base/proc_files.h"
#include "supervisor/base/text.h"

namespace bulkhead::supervisor {

WorkerProcess::WorkerProcess(FleetContext& fleet, const config::ModelSpec& model, ModelLog& model_log,
                             WorkerName worker, std::function<void()> noted, std::function<void(const Error&)> given_up)
    : context{fleet}, spec{model}, lines{model_log}, name{std::move(worker)}, sampling{fleet.io},
      termination{fleet,
                  {name, born_as, pid, pidfd, device.uuid},
                  model.deadlines.kill,
                  std::move(noted),
                  std::move(given_up)} {
    watch = HangWatch{{spec.deadlines.request + limits::hang_grace, spec.watchdog,
                       answer_budget(spec.deadlines.request, limits::answer_deadline)}};
}

WorkerProcess::~WorkerProcess() { close(); }

void WorkerProcess::close() {
    if (link) link->close();
    if (log) log->finish();
    if (fault) fault->finish();
    sampling.cancel();
    death_watch.reset();
    page.reset();
    pidfd.reset();
}

void WorkerProcess::cut_channels() {
    for (const auto& [id, end] : channels) ::shutdown(end.get(), SHUT_RDWR);
    channels.clear();
}

void WorkerProcess::take_channels(worker_link::Hello& hello) {
    channels.clear();
    for (std::size_t i = 0; i < hello.channels.size() && i < spec.channel.channels_max; ++i)
        channels[hello.channels[i]] = i < hello.fds.size() ? std::move(hello.fds[i]) : UniqueFd{};
    hello.fds.clear();
}

void WorkerProcess::complain(const std::string& what) {
    if (++complaints <= limits::link_complaints_max)
        spdlog::warn("worker={} pid={} sent a message that is ignored: {}", name.text(), pid, escaped(what));
}

// --- its load and its life

Result<std::string> WorkerProcess::configuration_for(const worker_link::Hello& hello, bool eager) const {
    if (hello.name() != born_as)
        return Error{ErrorCode::protocol_violation,
                     fmt::format("{} calls itself {}", name.text(), escaped(hello.name().text())),
                     "let only bulkheadd start workers"};
    if (!hello.speaks_our_version())
        return Error{ErrorCode::protocol_violation,
                     fmt::format("{} speaks versions {} to {} of the worker link, this daemon {} to {}", name.label(),
                                 hello.protocol[0], hello.protocol[1], worker_link::packets::version,
                                 worker_link::packets::version),
                     "install one release of all programs"};
    config::ModelSpec told = spec;
    if (eager) told.graphs = config::Graphs::off;
    std::string configure = worker_link::configure(told, name, device.is_gpu());
    if (configure.size() > packet_bytes_max)
        return Error{ErrorCode::config_invalid,
                     fmt::format("the declaration of {} has {} as JSON", spec.name, bytes_text(configure.size())),
                     fmt::format("declare fewer methods or buckets: {} is the most", bytes_text(packet_bytes_max))};
    return configure;
}

bool WorkerProcess::take(worker_link::Progress now) {
    const bool is_new_phase = now.phase != progress.phase;
    const bool is_more = now.done > progress.done;
    if (is_new_phase) tell_progress();  // report how far the former phase came
    progress = std::move(now);
    progress_at = Clock::now();
    if (is_new_phase || is_more) progressed_at = progress_at;
    if (is_new_phase || (is_more && progress.done == progress.total) ||
        progress_at - progress_told >= limits::progress_interval)
        tell_progress();
    return is_new_phase || is_more;
}

void WorkerProcess::tell_progress() {
    if (progress.phase.empty() || progress_told == progress_at) return;
    progress_told = progress_at;
    context.events.publish("progress", name,
                           {{"phase", progress.phase},
                            {"done", progress.done},
                            {"total", progress.total},
                            {"unit", progress.unit},
                            {"detail", progress.detail}});
}

void WorkerProcess::take(const worker_link::ChannelOpened& message) const {
    spdlog::debug("worker={} channel={} answered its client", name.text(), message.channel);
}

void WorkerProcess::take(const worker_link::ChannelRefused& message) {
    const Error error = worker_link::error_of(message);
    spdlog::info("worker={} channel={} refused: {}", name.text(), message.channel, error.text());
    // A worker that ran out of descriptors never received its end: tell the client on the
    // duplicate kept here.
    if (const auto end = channels.find(message.channel); end != channels.end()) {
        (void)send_packet(end->second.get(), channel::encode(channel::Failure{0, error}));
        channels.erase(end);
    }
}

void WorkerProcess::take(worker_link::Backtrace message) {
    if (!evidence.take(std::move(message))) complain("a second backtrace");
}

void WorkerProcess::statistics_are_known() {
    if (const auto answered = std::exchange(statistics_waiter, nullptr)) answered();
}

std::string WorkerProcess::last_progress() const {
    const auto ago = duration_text(Clock::now() - progressed_at);
    return progress.phase.empty() ? fmt::format("it has reported nothing since its start {} ago", ago)
                                  : fmt::format("its last progress was \"{}\" {} ago", progress.text(), ago);
}

std::optional<HangWatch::Reading> WorkerProcess::reading() const {
    if (!page) return std::nullopt;
    HangWatch::Reading reading{page->steps(), std::nullopt};
    const Clock::time_point since{std::chrono::nanoseconds{static_cast<std::int64_t>(page->running_since_ns())}};
    if (since > Clock::time_point{} && since <= Clock::now()) reading.running_since = since;
    return reading;
}

std::chrono::milliseconds WorkerProcess::answer_budget(std::chrono::milliseconds running,
                                                       std::chrono::milliseconds usual) const {
    if (spec.runtime != config::Runtime::python) return usual;
    return std::max<std::chrono::milliseconds>(usual, running + limits::hang_grace);
}

namespace {

void note(memory::Usage& usage, std::uint64_t bytes, bool is_ready) {
    if (is_ready && usage.at_ready == 0) {
        usage.at_ready = bytes;
        return;
    }
    std::uint64_t& peak = is_ready ? usage.serving_peak : usage.load_peak;
    peak = std::max(peak, bytes);
}

}  // namespace

void MemorySample::take(const HostMemory& host, bool is_ready) {
    host_bytes = host.bytes;
    host_usage.mapped = std::max<std::uint64_t>(host_usage.mapped, host.mapped);
    note(host_usage, host.bytes, is_ready);
}

void MemorySample::take(const GpuShare& share, bool ending, bool is_ready) {
    if (share.own_bytes) note(gpu_usage, *share.own_bytes, is_ready);
    if (ending && !gpu_free_before) gpu_free_before = share.free_bytes;
    if (gpu && share.pids.empty()) return;  // dying: the driver no longer lists it
    gpu = share;
    gpu_at = std::chrono::steady_clock::now();
    gpu_bytes = share.own_bytes;
}

void WorkerProcess::sample_memory(std::function<void()> sampled) {
    struct Sample {
        std::optional<HostMemory> host;
        std::optional<GpuShare> gpu;
    };
    if (pid == 0) return sampled();
    context.blocking.run(
        "reading the memory of " + name.text(),
        [pid = pid, marker = context.launch.marker(born_as), uuid = device.uuid, &gpus = context.gpus] {
            const auto gpu = uuid.empty() ? std::nullopt : gpus.read(uuid);
            return Sample{read_host_memory(pid), gpu ? std::optional{share_of(*gpu, pid, marker)} : std::nullopt};
        },
        [weak = weak_from_this(), sampled = std::move(sampled)](const Result<Sample>& sample) {
            const auto process = weak.lock();
            // A reaped process keeps its last sample: its pid may belong to another process by now.
            const bool counts = sample && process && !process->exit;
            if (counts && sample->host) process->memory.take(*sample->host, process->ready_at.has_value());
            if (counts && sample->gpu)
                process->memory.take(*sample->gpu, process->end_began.has_value(), process->ready_at.has_value());
            sampled();
        });
}

void WorkerProcess::sample_while(WorkerState state, const std::function<void()>& sampled) {
    if (!is_loading(state) && !is_serving(state)) {
        sampling.cancel();
        is_sampling = false;
    }
    if ((!is_loading(state) && state != WorkerState::busy) || std::exchange(is_sampling, true)) return;
    sampling.arm(is_loading(state) ? Clock::duration{limits::sample_loading_every} : limits::sample_busy_every,
                 [this, sampled] {
                     is_sampling = false;
                     sample_memory(sampled);
                 });
}

void WorkerProcess::read_memory_bound() {
    if (context.memory_limits) memory_bound = context.memory_limits->bound(born_as);
}

bool WorkerProcess::ran_out_of_memory() const {
    const auto killed = [&](const auto& limits) { return limits && limits->oom_kills(born_as).value_or(0) > 0; };
    return killed(context.memory_limits) || (cgroups != nullptr && cgroups->oom_kills(born_as).value_or(0) > 0);
}

std::optional<std::string> WorkerProcess::gpu_quarantined() const {
    return device.is_gpu() ? context.gpu_quarantine.reason(device.uuid) : std::nullopt;
}

// --- its end

std::chrono::milliseconds WorkerProcess::ready_for() const {
    if (!ready_at) return {};
    return std::chrono::duration_cast<std::chrono::milliseconds>(end_began.value_or(Clock::now()) - *ready_at);
}

ExitFacts WorkerProcess::exit_facts(WorkerState state) const {
    ExitFacts facts;
    facts.state = state;
    facts.exit = exit;
    facts.end_asked = end_asked;
    facts.drain_asked = drain_until.has_value();
    facts.drain_overdue = drain_deadline_passed();
    facts.escalation = termination.means();
    facts.first_sign = evidence.first_sign;
    facts.was_capturing = evidence.lost_in.value_or(state) == WorkerState::capturing;
    facts.was_ready = ready_at.has_value();
    facts.graphs_preferred = spec.graphs == config::Graphs::preferred;
    if (failure) facts.failure = failure->code;
    facts.gpu_granted = device.is_gpu() && grant >= Grant::owed;
    return facts;
}

std::string WorkerProcess::end_reason() const {
    if (failure) return failure->text();
    std::string reason = evidence.cause(exit);
    if (const std::string line = lines.last_line(name.replica, name.generation); !line.empty())
        reason += fmt::format("; last output: {}", line);
    return reason;
}

Error WorkerProcess::load_error() const {
    return {evidence.memory_bound ? ErrorCode::out_of_memory : ErrorCode::load_failed,
            fmt::format("loading {}: process {} {}, {}", name.label(), pid, end_reason(),
                        progress.phase.empty() ? "before it said anything" : "in phase " + progress.text()),
            fmt::format("look at `bulkhead logs {}`", spec.name)};
}

CrashReport WorkerProcess::crash_report() const {
    CrashReport report = evidence.report;
    report.worker = name;
    report.pid = pid;
    if (report.time_ms == 0) report.time_ms = unix_ms();
    report.cause = failure ? failure->attempt : evidence.cause(exit);
    report.state = to_string(evidence.lost_in.value_or(WorkerState::stopped));
    report.exit = *exit;
    report.log = lines.last_lines(name.replica, name.generation, limits::crash_log_lines_max);
    report.host_bytes = memory.host_bytes;
    report.gpu_bytes = memory.gpu_bytes;
    report.device = device.text;
    report.ready_for_ms = ready_for().count();
    return report;
}

Trace WorkerProcess::trace() const {
    Trace trace;
    trace.worker = name;
    trace.pid = pid;
    trace.group_empty = exit->group_empty;
    if (cgroups != nullptr) trace.cgroup = cgroups->folder(born_as);
    trace.marker = context.launch.marker(born_as);
    trace.slab_prefix = slab_owner_prefix(context.launch.token, spec.name, name.replica, name.generation);
    trace.gpu_uuid = device.uuid;
    trace.gpu = memory.gpu;
    trace.gpu_is_recent = memory.gpu && !memory.gpu->pids.empty() && end_began && memory.gpu_at >= *end_began;
    return trace;
}

Receipt WorkerProcess::receipt(const Reclaimed& reclaimed) const {
    const auto now = Clock::now();
    Receipt receipt;
    receipt.worker = name;
    receipt.pid = pid;
    receipt.ended = ended;
    receipt.exit = *exit;
    receipt.ms = std::chrono::duration_cast<std::chrono::milliseconds>(now - end_began.value_or(now)).count();
    std::uint64_t still_held = 0;
    for (const auto& holder : reclaimed.remains.held_by)
        if (holder.what != "gpu") still_held += holder.bytes;
    if (memory.host_bytes) receipt.host_bytes = *memory.host_bytes - std::min(*memory.host_bytes, still_held);
    const GpuReturn returned = gpu_return(memory.gpu, memory.gpu_free_before, reclaimed.remains);
    receipt.gpu_bytes = returned.bytes;
    receipt.gpu_bytes_by = returned.by;
    receipt.verified = reclaimed.verified();
    receipt.held_by = reclaimed.remains.held_by;
    // Only the worker knows its importers: the driver attributes imported memory to no process.
    for (const worker_link::Importer& importer : statistics.importers) {
        const auto importer_pid = static_cast<pid_t>(importer.pid);
        if (!process_exists(importer_pid)) continue;  // its memory ended with it
        receipt.held_by.push_back({importer_pid, process_name(importer_pid), importer.bytes, "gpu_slab"});
        receipt.verified = false;
    }
    return receipt;
}

const WorkerProcess* ExitedProcesses::find(const WorkerName& born_as) const {
    const auto found = std::ranges::find_if(all_, [&](const One& one) { return one.process->born_as == born_as; });
    return found == all_.end() ? nullptr : found->process.get();
}

std::vector<ExitedProcesses::OnUnloaded> ExitedProcesses::remove(const std::shared_ptr<WorkerProcess>& process) {
    const auto found = std::ranges::find(all_, process, &One::process);
    auto waiters = std::move(found->waiters);
    all_.erase(found);
    return waiters;
}

}  // namespace bulkhead::supervisor

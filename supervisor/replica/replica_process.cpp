/// Starts a replica's process and handles the messages on its link.

#include <iterator>

#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include "supervisor/base/json_members.h"
#include "supervisor/base/limits.h"
#include "supervisor/base/proc_files.h"
#include "supervisor/base/text.h"
#include "supervisor/crash/crash_report.h"
#include "supervisor/replica/replica.h"
#include "supervisor/states/message_answers.h"

namespace bulkhead::supervisor {

static_assert(std::size(message_answers) == std::variant_size_v<worker_link::Message>);

using Clock = Deadline::Clock;

void Replica::make_process(const WorkerName& name) {
    process_ = std::make_shared<WorkerProcess>(
        context_, spec_, log_, name, [this] { remember(); }, [this](const Error& error) { on_given_up(error); });
}

void Replica::start(std::string cause) {
    if (context_.gate != nullptr && !context_.gate->may_start(*this)) {
        reason_ = cause + "; it waits for memory";
        return;
    }
    const bool is_restart = state_ == WorkerState::backoff;
    // The keeper requires spawns in the order of generations. The thread of `BlockingQueue` keeps it:
    // a replica with a known device queues there behind replicas whose device is still
    // being looked for.
    generation_ = ++context_.generation_last;
    make_process(name());
    transition(WorkerEvent::spawn_asked, std::move(cause));
    begin_load_budget();
    declaration_.clear();
    context_.blocking.run(
        fmt::format("loading {}: looking at {}", name().label(), spec_.file.string()),
        [spec = spec_] { return fingerprint(spec); },
        [this, process = std::weak_ptr{process_}](Result<std::string> declaration) {
            if (!is_present(process)) return;
            on_file_seen(std::move(declaration));
        });
    auto known = std::exchange(same_device_, std::nullopt);
    if (!known && spec_.device == "cpu") known = Device{};
    if (known && context_.placing == 0) return on_placed(*known, is_restart);
    ++context_.placing;
    context_.blocking.run(
        fmt::format("placing it on device \"{}\"", spec_.device),
        // A GPU declared by name is found even if it is quarantined; the start is then refused
        // with the reason.
        [&gpus = context_.gpus, declared = spec_.device, known,
         quarantined = spec_.device == "auto" ? context_.gpu_quarantine.all()
                                              : std::map<std::string, std::string>{}]() -> Result<Device> {
            if (known) return *known;
            return place(gpus, declared, quarantined);
        },
        [this, &context = context_, process = std::weak_ptr{process_}, is_restart](const Result<Device>& device) {
            --context.placing;
            if (!process.expired()) on_placed(device, is_restart);
        });
}

void Replica::on_placed(const Result<Device>& device, bool is_restart) {
    if (state_ != WorkerState::spawning)
        return without_process(
            process_->failure.value_or(Error{ErrorCode::cancelled, "it was not started: an unload came first", {}}));
    if (!device)
        return without_process(Error{device.error()}.during("loading " + name().label()),
                               device.error().code == ErrorCode::resources_exhausted ? Ending::gpu_refused
                                                                                     : Ending::load_failed);
    process_->device = *device;
    device_text_ = device->text;
    if (const auto reason = process_->gpu_quarantined())
        return without_process(
            {ErrorCode::resources_exhausted,
             fmt::format("loading {}: {} ({}) is quarantined: {}", name().label(), device->text, device->uuid, *reason),
             fmt::format("see `bulkhead gpus`; when it is in order again: `bulkhead gpus --lift {}`", device->uuid)},
            Ending::gpu_refused);
    if (is_restart) ++history_.restarts;

    auto request = context_.launch.request(name(), spec_, device->uuid);
    if (!request) return without_process(std::move(request.error()));
    const auto exited = [this, process = std::weak_ptr{process_}](const ProcessExit& exit) {
        if (is_present(process)) on_exited(exit);
    };
    if (auto blank = context_.take_blank ? context_.take_blank(*request) : std::nullopt) {
        spdlog::info("worker={} pid={} was blank {}", name().text(), blank->process.pid, blank->name.text());
        process_->born_as = blank->name;
        if (blank->has_cgroup) process_->cgroups = context_.cgroups.get();
        context_.keeper.adopt(blank->name, exited);
        return on_spawned(std::shared_ptr{process_}, std::move(blank->process));
    }
    contain(*request, context_.cgroups.get());
    if (request->cgroup) process_->cgroups = context_.cgroups.get();
    context_.keeper.spawn(
        std::move(*request),
        [this, weak = std::weak_ptr{process_}](Result<SpawnedProcess> spawned) {
            if (const auto process = weak.lock()) on_spawned(process, std::move(spawned));
        },
        exited);
}

void Replica::on_spawned(const std::shared_ptr<WorkerProcess>& process, Result<SpawnedProcess> spawned) {
    if (!spawned) return without_process(std::move(spawned.error()));
    process->pid = spawned->pid;
    process->pidfd = std::move(spawned->pidfd);
    process->spawned_at = Clock::now();
    bound_memory();
    process->log = LogPipe::open(context_.io, std::move(spawned->log), process->name, log_);
    CrashEvidence::note_oom_kills(context_.blocking, std::shared_ptr<CrashEvidence>{process, &process->evidence});
    open_link(std::move(spawned->link));
    begin_record();
    if (!is_live(state_))  // given up while it was spawned
        process_->termination.escalate(state_ == WorkerState::stopping ? Escalation::sigterm : Escalation::sigkill);
}

/// Bounds the memory of the process, so that a leak ends this process and not the machine.
void Replica::bound_memory() {
    const auto bytes =
        context_.gate == nullptr || process_->device.is_gpu() ? std::nullopt : context_.gate->bound(*this);
    if (!bytes || !context_.memory_limits) return;
    if (const auto set = context_.memory_limits->set(process_->born_as, process_->pid, *bytes); set)
        process_->read_memory_bound();
    else
        spdlog::warn("worker={} pid={} may use memory without a bound: {}", name().text(), process_->pid,
                     set.error().text());
}

void Replica::open_link(UniqueFd link) {
    process_->link = PacketLink::make(context_.io, std::move(link));
    process_->link->start([this](Packet& packet) { on_packet(packet); },
                          [this](const Error* why) { on_link_closed(why); });
}

void Replica::on_packet(Packet& packet) {
    const std::string_view text{reinterpret_cast<const char*>(packet.bytes.data()), packet.bytes.size()};
    auto message = worker_link::parse(text);
    if (!message) return process_->complain(message.error().attempt);
    if (auto* hello = std::get_if<worker_link::Hello>(&*message)) hello->fds = std::move(packet.fds);
    dispatch(*message);
}

void Replica::dispatch(worker_link::Message& message) {
    const auto& [type, answers] = message_answers[message.index()];
    switch (answers[static_cast<std::size_t>(state_)]) {
    case '+': break;
    case '!': return process_->complain(fmt::format("{}, while it was {}", type, to_string(state_)));
    default: return;
    }
    const auto process = process_;
    const std::size_t channels_before = channels();
    std::visit(
        [this](auto& value) {
            if constexpr (requires { on_message(value); })
                on_message(value);
            else
                process_->take(std::move(value));
        },
        message);
    if (context_.gate != nullptr && process == process_ && channels() != channels_before)
        context_.gate->channels_changed(*this);
}

void Replica::on_message(worker_link::Hello& message) {
    if (state_ == WorkerState::adopting) return on_adoption_hello(message);
    auto configuration = process_->configuration_for(message, !history_.eager.empty());
    if (!configuration) return refuse(configuration.error());
    take_page(message);
    take_fault(message);
    transition(WorkerEvent::said_hello, "its process said hello");
    arm_load_deadline();
    // Look at the file before the worker may read it. Otherwise a file that was replaced in between
    // would count as the one the process has loaded.
    if (declaration_.empty())
        process_->configuration = std::move(*configuration);
    else
        process_->link->send(std::move(*configuration));
}

/// Fails the load if the file's disk does not answer: the worker would hang on it too.
void Replica::on_file_seen(Result<std::string> declaration) {
    if (declaration) {
        declaration_ = std::move(*declaration);
        remember();
        if (!process_->configuration.empty()) process_->link->send(std::exchange(process_->configuration, {}));
    } else if (is_live(state_)) {
        fail(declaration.error());
        if (process_->pid != 0) process_->termination.kill();
    }
}

void Replica::on_message(worker_link::Progress& message) {
    const bool captures = message.phase == "capturing" && can(WorkerEvent::capture_began);
    if (captures) transition(WorkerEvent::capture_began, "warmed up");
    if (process_->take(std::move(message)) || captures) begin_load_budget();
}

void Replica::on_message(const worker_link::GrantAsked& /*message*/) {
    if (process_->gpu_lock.state() != AsyncMutex::Lock::State::none)
        return process_->complain("grant_asked, a second time");
    if (!process_->device.is_gpu()) return process_->send(worker_link::Grant{});
    process_->grant = Grant::awaited;
    process_->load_budget.pause(Clock::now());
    deadline_.cancel();
    take_gpu_lock();
}

/// On a GPU, a process holds the lock while it changes memory, so that a change of free memory
/// has one cause.
void Replica::take_gpu_lock() {
    if (!process_->device.is_gpu()) return on_gpu_locked();
    process_->gpu_lock.take(context_.gpu_mutex(process_->device.uuid), [this, process = std::weak_ptr{process_}] {
        if (is_present(process)) on_gpu_locked();
    });
}

void Replica::on_gpu_locked() {
    switch (use_of_lock(state_, process_->grant, process_->evidence.first_sign)) {
    case LockUse::keep: return;
    case LockUse::pass_on: return process_->gpu_lock.end();
    case LockUse::drain: return sample_then(&Replica::begin_drain);
    case LockUse::grant: break;
    }
    if (process_->load_budget.is_paused()) {
        process_->load_budget.resume(Clock::now());
        arm_load_deadline();
    }
    process_->grant = Grant::given;
    remember();
    process_->send(worker_link::Grant{});
}

void Replica::on_message(worker_link::Ready& message) {
    if (state_ != WorkerState::adopting) return become_ready(message);
    if (process_->ready_at) return;
    process_->ready_at = Clock::now();  // if it dies before its adoption, it counts as a process
                                        // that was ready
    policy_.became_ready();
}

void Replica::become_ready(worker_link::Ready& message) {
    process_->statistics.graphs = std::move(message.graphs);
    process_->ready_at = Clock::now();
    process_->gpu_lock.end();
    if (!message.torch.empty()) context_.torch = message.torch;
    policy_.became_ready();
    transition(
        WorkerEvent::became_ready,
        fmt::format("loaded in {} on {}", duration_text(static_cast<std::int64_t>(message.load_ms)), device_text_));
    // If the process is asked to end, they wait for the next one.
    if (!is_asked_to_end()) load_waiters_.answer({name(), state_, process_->pid, 0});
    sample_memory([this, process = std::weak_ptr{process_}] {
        if (is_present(process) && context_.gate != nullptr) context_.gate->measured(*this);
    });
}

void Replica::on_message(worker_link::Statistics& message) {
    process_->statistics = std::move(message);
    if (process_->watch.answered()) ask_whether_it_lives();
    arm_watch();
    process_->statistics_are_known();
    if (context_.gate != nullptr) context_.gate->counted(*this);
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
    terminate_unless_ended();
}

void Replica::on_message(const worker_link::Dying& message) {
    process_->evidence.report.signal = message.signal;
    if (!is_live(state_)) return process_->cut_channels();
    lose(FirstSign::dying, fmt::format("dying of {}", signal_name(message.signal)));
    // The process ends by itself after its backtrace and its core file, if it may write one. This
    // is the time limit.
    if (process_->termination.means() < Escalation::sigkill)
        process_->termination.escalate_after(
            spec_.core_bytes_max > 0 ? limits::core_dump_deadline : limits::dying_deadline, Escalation::sigkill);
}

/// Takes the page's descriptor and leaves the others in the message.
void Replica::take_page(worker_link::Hello& hello) {
    if (!hello.page.value_or(false) || hello.fds.empty()) return;
    if (process_->page) return (void)hello.fds.erase(hello.fds.begin());  // the same page
    const UniqueFd memfd = std::move(hello.fds.front());
    hello.fds.erase(hello.fds.begin());
    auto page = WorkerPageView::map(memfd);
    if (!page) return process_->complain(page.error().text());
    process_->page = std::move(*page);
    process_->death_watch = context_.death_watch->watch(process_->page, [this, process = std::weak_ptr{process_}] {
        if (is_present(process)) on_main_thread_ended();
    });
}

/// Python code cannot run in the handler of a fatal signal: `faulthandler` writes what `dying` and
/// `backtrace` say.
void Replica::take_fault(worker_link::Hello& hello) {
    if (!hello.fault.value_or(false) || hello.fds.empty()) return;
    UniqueFd pipe = std::move(hello.fds.front());
    hello.fds.erase(hello.fds.begin());
    if (process_->fault) return;  // the same pipe
    process_->fault = LogPipe::open(context_.io, std::move(pipe), process_->name, log_,
                                    [this, weak = std::weak_ptr{process_}](const std::string& line) {
                                        const auto process = weak.lock();
                                        if (!process) return;
                                        process->evidence.take_printed(line);
                                        const auto signal = fatal_signal(line);
                                        if (!signal || process != process_) return;
                                        worker_link::Message dying = worker_link::Dying{*signal};
                                        dispatch(dying);
                                    });
}

/// The first sign of most deaths: it comes before the kernel has freed the memory and
/// closed the sockets.
void Replica::on_main_thread_ended() {
    process_->link->receive_waiting();  // its last packets come first: drained, failed, dying
    if (process_->fault) process_->fault->finish();
    process_->cut_channels();
    // A draining process may have ended as requested: its exit decides.
    if (is_live(state_) && state_ != WorkerState::draining) lose(FirstSign::end, main_thread_ended);
}

}  // namespace bulkhead::supervisor

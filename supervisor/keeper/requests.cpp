/// Handles the supervisor's requests. An invalid request ends that supervisor: it has a defect, or
/// is not a supervisor at all. Its successor gets the workers as they are.

#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <utility>

#include "ipc/base/pidfd.h"
#include "supervisor/keeper/base/limits.h"
#include "supervisor/keeper/base/say.h"
#include "supervisor/keeper/keeper.h"
#include "supervisor/keeper/process/spawn_strings.h"

namespace bulkhead::keeper {

using keeper_link::Type;

namespace {

/// Both ends of the connections between a worker and the daemon.
struct WorkerWiring {
    UniqueFd link, worker_link;
    UniqueFd log, worker_log;
};

/// The daemon's ends never block; the worker's ends do, as programs expect of their output.
SpawnResult<WorkerWiring> make_wiring() noexcept {
    std::array<int, 2> ends{};
    if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends.data()) != 0)
        return SpawnFailure{SpawnStep::socket_pair, errno};
    WorkerWiring wiring{UniqueFd{ends[0]}, UniqueFd{ends[1]}, {}, {}};
    if (::pipe2(ends.data(), O_CLOEXEC) != 0) return SpawnFailure{SpawnStep::log_pipe, errno};
    wiring.log = UniqueFd{ends[0]};
    wiring.worker_log = UniqueFd{ends[1]};
    ::fcntl(wiring.link.get(), F_SETFL, O_NONBLOCK);
    ::fcntl(wiring.log.get(), F_SETFL, O_NONBLOCK);
    return wiring;
}

}  // namespace

void Keeper::take_requests() noexcept {
    using Kind = ReceivedPacket::Kind;
    for (int i = 0; i < limits::requests_per_turn; ++i) {
        if (!supervisor_.link() || !outbox_.takes_requests()) return;
        ReceivedPacket packet = supervisor_.link().receive();
        switch (packet.kind) {
        case Kind::nothing: return;
        case Kind::closed: return on_link_closed();
        case Kind::malformed: return on_violation("a malformed packet");
        case Kind::packet: break;
        }
        on_request(std::move(packet));  // closes its descriptor before the answer leaves
        send_due();
    }
}

/// Reads the last packets of a supervisor that ended or hung up. Ledgers and `stop` still count;
/// spawn requests do not, since no one waits for the answer.
void Keeper::drain_link() noexcept {
    for (int i = 0; i < limits::last_words_max && supervisor_.link(); ++i) {
        ReceivedPacket packet = supervisor_.link().receive();
        if (packet.kind != ReceivedPacket::Kind::packet) return;
        if (packet.header.type != static_cast<std::uint16_t>(Type::spawn)) on_request(std::move(packet));
    }
}

void Keeper::on_request(ReceivedPacket packet) noexcept {
    if (packet.header.version < keeper_link::version_min || packet.header.version > keeper_link::version_max)
        return on_violation("a packet of another protocol version");
    const auto type = static_cast<Type>(packet.header.type);
    if (!supervisor_.has_greeted() && type != Type::supervisor_hello) return on_violation("a request before the hello");
    switch (type) {
    case Type::supervisor_hello: return on_hello(packet.body);
    case Type::spawn: return on_spawn(packet);
    case Type::signal: return on_signal(packet.body);
    case Type::ledger: return on_ledger(packet.body);
    case Type::forget: return on_forget(packet.body);
    case Type::stop: return on_stop();
    case Type::hand_over: return on_parting(Parting::hand_over, packet.body);
    case Type::upgrade: return on_parting(Parting::upgrade, packet.body);
    case Type::reload_done: return on_reload_done(packet.body);
    default: return on_violation("a packet of unknown type");
    }
}

void Keeper::on_hello(std::span<const std::byte> body) noexcept {
    const auto hello = take<keeper_link::SupervisorHello>(body);
    if (!hello || !body.empty() || supervisor_.has_greeted()) return on_violation("a wrong or second hello");
    if (hello->version_max < keeper_link::version_min || hello->version_min > keeper_link::version_max) {
        say("error: protocol_violation: greeting supervisor pid=%d: it speaks versions %u to %u, this keeper %u to %u; "
            "install bulkheadd and bulkhead-supervisor of one release",
            supervisor_.pid(), hello->version_min, hello->version_max, keeper_link::version_min,
            keeper_link::version_max);
        incompatible_ = true;
        return supervisor_.kill();
    }
    supervisor_.greeted();
    reload_by_ = never;
    if (course_ == Course::serving) station_.service_manager.ready("a supervisor runs");
}

void Keeper::on_spawn(ReceivedPacket& packet) noexcept {
    auto body = packet.body;
    const auto spawn = take<keeper_link::Spawn>(body);
    const auto strings = spawn ? split_strings(*spawn, body) : std::nullopt;
    if (!strings || !is_name(spawn->key) || spawn->has_cgroup > 1) return on_violation("a wrong spawn");
    if (spawn->key.generation <= generation_last_) return on_violation("a generation that was used before");
    const bool cgroup_came = static_cast<bool>(packet.descriptor);
    if (cgroup_came != (spawn->has_cgroup == 1) && !packet.descriptors_lost)
        return on_violation("a spawn with another number of descriptors than it says");
    generation_last_ = spawn->key.generation;

    const auto fail = [&](SpawnFailure failure) {
        outbox_.answer_spawn_failed(packet.header.request_id,
                                    {spawn->key, static_cast<std::uint32_t>(failure.step), failure.error_number});
    };
    if (packet.descriptors_lost) return fail({SpawnStep::descriptors, EMFILE});
    Worker* worker = table_.free_slot();
    if (worker == nullptr) return fail({SpawnStep::table_full, ENOSPC});
    auto wiring = make_wiring();
    if (!wiring) return fail(wiring.error());

    const std::array<int, 4> descriptors{station_.null.get(), wiring->worker_log.get(), wiring->worker_log.get(),
                                         wiring->worker_link.get()};
    auto child = station_.spawner.spawn({.program = strings->argv[0],
                                         .argv = strings->argv,
                                         .environment = strings->environment,
                                         .descriptors = descriptors,
                                         .cgroup_fd = packet.descriptor.get(),
                                         .core_bytes_max = spawn->core_bytes_max,
                                         .oom_score_adj = station_.oom_score_worker});
    if (!child) return fail(child.error());

    worker->state = Worker::State::running;
    worker->key = spawn->key;
    worker->pid = child->pid;
    worker->pidfd = std::move(child->pidfd);
    worker->link = std::move(wiring->link);
    worker->log = std::move(wiring->log);
    worker->spawned_unix_ms = unix_ms_now();
    outbox_.answer_spawned(packet.header.request_id, *worker);
}

/// The worker may have ended while the signal request was on its way: then nothing is signalled.
void Keeper::on_signal(std::span<const std::byte> body) noexcept {
    const auto signal = take<keeper_link::Signal>(body);
    if (!signal || !body.empty() || signal->number < 1 || signal->number > SIGRTMAX || signal->whole_group > 1)
        return on_violation("a wrong signal");
    const Worker* worker = table_.find(signal->key);
    if (worker == nullptr) return on_violation("a signal for an unknown worker");
    if (worker->state != Worker::State::running) return;
    if (signal->whole_group == 1) signal_group(worker->pid, signal->number);
    // After the group too: a leader may have left it, and a second SIGKILL does no harm.
    send_signal(worker->pidfd, signal->number);
}

void Keeper::on_ledger(std::span<const std::byte> body) noexcept {
    const auto key = take<WorkerKey>(body);
    if (!key || body.size() > keeper_link::ledger_bytes_max) return on_violation("a wrong ledger");
    const Worker* worker = table_.find(*key);
    if (worker == nullptr) return on_violation("a ledger for an unknown worker");
    table_.set_ledger(*worker, body);
}

void Keeper::on_forget(std::span<const std::byte> body) noexcept {
    const auto key = take<WorkerKey>(body);
    if (!key || !body.empty()) return on_violation("a wrong forget");
    Worker* worker = table_.find(*key);
    if (worker == nullptr || worker->state != Worker::State::dead || worker->exit_due)
        return on_violation("a forget for a worker that is not known to be dead");
    table_.forget(*worker);
}

void Keeper::on_stop() noexcept {
    if (course_ == Course::serving) station_.service_manager.stopping();
    course_ = Course::stopping;
    stop_by_ = never;
    station_.directory.remove_socket();
    supervisor_.must_end_by(Clock::now() + limits::supervisor_end_deadline);
}

/// The supervisor is about to end, and the next starts at once. An earlier `stop` takes precedence.
void Keeper::on_parting(Parting parting, std::span<const std::byte> body) noexcept {
    if (!body.empty() || parting_ != Parting::none) return on_violation("a wrong or second word of parting");
    if (course_ == Course::stopping) return;
    parting_ = parting;
    supervisor_.must_end_by(Clock::now() + limits::supervisor_end_deadline);
}

void Keeper::on_reload_done(std::span<const std::byte> body) noexcept {
    if (!body.empty()) return on_violation("a wrong end of a reload");
    if (reload_by_ == never) return;  // its deadline has passed
    reload_by_ = never;
    if (course_ == Course::serving) station_.service_manager.ready("reload asked for, nothing changed: see the log");
}

}  // namespace bulkhead::keeper

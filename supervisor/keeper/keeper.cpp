#include "supervisor/keeper/keeper.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <csignal>
#include <cstring>
#include <utility>

#include "ipc/base/pidfd.h"
#include "supervisor/keeper/base/limits.h"
#include "supervisor/keeper/base/say.h"

namespace bulkhead::keeper {

Keeper::Keeper(Station station) noexcept : station_{std::move(station)}, started_unix_ms_{unix_ms_now()} {}

void Keeper::resume(const SavedState& state) {
    generation_last_ = state.keeper.generation_last;
    started_unix_ms_ = state.keeper.started_unix_ms;
    violations_ = state.keeper.violations;
    executions_ = static_cast<std::uint16_t>(state.keeper.executions + 1);
    supervisor_.resume(state.keeper.supervisor_starts);
    if (state.keeper.reload_due == 1) outbox_.ask_to_reload();
    children_left_ = true;  // SIGCHLD of a child that ended meanwhile may be lost
    adopt_workers(state, table_);
}

int Keeper::run() noexcept {
    station_.service_manager.status("starting a supervisor");
    while (course_ != Course::ended) {
        pass_deadlines();
        if (course_ == Course::ended) break;
        send_due();
        wait_for_events();
    }
    return exit_status_;
}

void Keeper::wait_for_events() noexcept {
    PacketSocket& link = supervisor_.link();
    const short wanted = static_cast<short>((outbox_.takes_requests() ? POLLIN : 0) | (link_is_full_ ? POLLOUT : 0));
    PathClaim& claim = station_.directory.claim();
    const int claim_fd = claim_is_answered_ ? claim.fd() : -1;
    std::array<pollfd, 3> sources{{{station_.signals.get(), POLLIN, 0}, {link.fd(), wanted, 0}, {claim_fd, POLLIN, 0}}};

    const auto deadline = children_left_ ? Clock::time_point{} : next_deadline();
    const timespec timeout = until(deadline);
    if (::ppoll(sources.data(), sources.size(), deadline == never ? nullptr : &timeout, nullptr) < 0) return;

    if (sources[1].revents != 0) {
        link_is_full_ = false;
        send_due();
        take_requests();
    }
    if (sources[2].revents != 0) claim_is_answered_ = claim.answer();
    if (sources[0].revents != 0) take_signals();
    if (children_left_ && course_ != Course::ended) take_children();
}

Clock::time_point Keeper::next_deadline() noexcept {
    auto next = std::min({stop_by_, send_retry_, reload_by_, supervisor_.deadline(), supervisor_.read_deadline(),
                          station_.service_manager.deadline()});
    if (!supervisor_.runs()) next = std::min(next, supervisor_.start_due());
    for (const Worker& worker : table_.all())
        if (worker.state == Worker::State::ending) next = std::min(next, worker.group_deadline);
    return next;
}

void Keeper::pass_deadlines() noexcept {
    const auto now = Clock::now();
    settle_ending(now);
    station_.service_manager.pass_deadlines(now);
    if (send_retry_ <= now) send_retry_ = never;
    if (reload_by_ <= now) {
        reload_by_ = never;
        if (course_ == Course::serving) station_.service_manager.ready("a reload is still under way");
    }
    if (stop_by_ <= now) {
        say("error: deadline_exceeded: stopping: the supervisor did not unload everything within %lld s; killing what "
            "is left",
            static_cast<long long>(limits::stop_deadline.count() / 1000));
        return end(1);
    }
    if (supervisor_.deadline() <= now) {
        if (course_ == Course::stopping) return end(0);
        say("WARN supervisor pid=%d killed cause=\"%s\"", supervisor_.pid(),
            parting_ != Parting::none ? "it handed over and did not end"
            : supervisor_.link()      ? "no hello within its deadline"
                                      : "it closed its link and did not end");
        supervisor_.kill();
    }
    if (supervisor_.read_deadline() <= now) on_unread_link();
    if (!supervisor_.runs() && supervisor_.start_due() <= now) start_supervisor();
}

/// A supervisor with unread data for this long hangs: kills it to start the next. Workers
/// are unaffected.
void Keeper::on_unread_link() noexcept {
    supervisor_.note_reading();
    if (supervisor_.read_deadline() == never) return;
    say("WARN supervisor pid=%d killed cause=\"it hangs: it has not read its link for %lld s\"", supervisor_.pid(),
        static_cast<long long>(limits::supervisor_read_deadline.count() / 1000));
    drain_link();
    supervisor_.kill();
}

void Keeper::send_due() noexcept {
    if (!supervisor_.link()) return;
    supervisor_.note_reading();
    if (!link_is_full_ && send_retry_ == never) {
        switch (outbox_.flush(supervisor_.link(), table_)) {
        case SendOutcome::sent: break;
        case SendOutcome::full: link_is_full_ = true; break;
        case SendOutcome::exhausted: send_retry_ = Clock::now() + limits::send_retry; break;
        case SendOutcome::gone: on_link_closed(); break;
        }
    }
    supervisor_.note_sent();
}

void Keeper::take_signals() noexcept {
    std::array<signalfd_siginfo, 8> signals;
    ssize_t size = 0;
    while ((size = ::read(station_.signals.get(), signals.data(), sizeof signals)) > 0) {
        const std::size_t count = static_cast<std::size_t>(size) / sizeof signals[0];
        for (std::size_t i = 0; i < count && course_ != Course::ended; ++i) {
            switch (signals[i].ssi_signo) {
            case SIGCHLD: children_left_ = true; break;
            case SIGHUP: on_hangup(); break;
            default: on_stop_signal(); break;
            }
        }
    }
}

void Keeper::on_hangup() noexcept {
    outbox_.ask_to_reload();
    if (course_ != Course::serving || !supervisor_.ever_greeted()) return;
    station_.service_manager.reloading();
    reload_by_ = Clock::now() + limits::reload_deadline;
}

void Keeper::on_stop_signal() noexcept {
    switch (course_) {
    case Course::serving:
        course_ = Course::stop_asked;
        stop_by_ = Clock::now() + limits::stop_deadline;
        station_.service_manager.stopping();
        outbox_.ask_to_stop();
        break;
    case Course::stop_asked:
        say("WARN second signal to stop: killing what is left");
        end(1);
        break;
    case Course::stopping: end(0); break;
    case Course::ended: break;
    }
}

void Keeper::take_children() noexcept {
    children_left_ = true;
    for (int i = 0; i < limits::reaps_per_turn && course_ != Course::ended; ++i) {
        const auto ended = next_ended_child();
        if (!ended) {
            children_left_ = false;
            claim_is_answered_ = true;
            break;
        }
        if (ended->pid == supervisor_.pid()) {
            on_supervisor_ended(*ended);
        } else if (Worker* worker = table_.find_running(ended->pid)) {
            on_worker_ended(*worker, *ended);
        } else {
            reap(*ended);  // an orphan of a worker
        }
    }
    settle_ending(Clock::now());
}

void Keeper::on_worker_ended(Worker& worker, const EndedChild& ended) noexcept {
    kill_group_and_reap(ended);
    worker.fate = ended.fate;
    worker.exit_number = ended.number;
    worker.group_deadline = Clock::now() + limits::group_empty_deadline;
    worker.state = Worker::State::ending;
}

void Keeper::settle_ending(Clock::time_point now) noexcept {
    for (Worker& worker : table_.all()) {
        if (worker.state != Worker::State::ending) continue;
        worker.group_empty = !process_group_exists(worker.pid);
        if (!worker.group_empty && now < worker.group_deadline) continue;
        worker.state = Worker::State::dead;
        worker.exit_due = true;
    }
}

void Keeper::start_supervisor() noexcept {
    incompatible_ = false;
    parting_ = Parting::none;
    link_is_full_ = false;
    send_retry_ = never;
    const auto started = supervisor_.start(station_.spawner, station_.command, station_.null.get(),
                                           station_.directory.listening_fd(), station_.oom_score_own);
    if (!started) {
        say("error: internal: starting %s: %s; name the program with --supervisor", station_.command.program(),
            strerrordesc_np(started.error().error_number));
        if (!supervisor_.ever_greeted()) return end(1);
        supervisor_.ended();
        return;
    }
    keeper_link::KeeperHello hello{};
    hello.version_min = keeper_link::version_min;
    hello.version_max = keeper_link::version_max;
    hello.worker_count = table_.count();
    hello.generation_last = generation_last_;
    hello.supervisor_starts = supervisor_.starts();
    hello.started_unix_ms = started_unix_ms_;
    hello.keeper_pid = ::getpid();
    hello.executions = executions_;
    hello.upgrade_failed = static_cast<std::uint16_t>(upgrade_failed_);
    outbox_.hand_over(hello);
    if (course_ == Course::stop_asked) outbox_.ask_to_stop();
}

void Keeper::on_supervisor_ended(const EndedChild& supervisor) noexcept {
    drain_link();
    kill_group_and_reap(supervisor);
    const auto delay = supervisor_.ended(parting_ != Parting::none);
    if (course_ == Course::stopping) return end(0);

    // A supervisor that failed before any hello has nothing to hand over, and a restart
    // would fail too.
    if (!supervisor_.ever_greeted() && (supervisor.fate == WorkerFate::exited || incompatible_)) {
        if (supervisor.number == exit_config_invalid) return end(exit_config_invalid);
        if (!incompatible_)  // an incompatible one has printed why
            say("WARN supervisor pid=%d ended code=%d before its first hello: nothing to restart", supervisor.pid,
                supervisor.number);
        return end(1);
    }
    const char* how = supervisor.fate == WorkerFate::exited ? "code" : "signal";
    const auto next = static_cast<unsigned long long>(supervisor_.starts() + 1);
    if (parting_ == Parting::none) {
        station_.service_manager.status("the supervisor ended, the workers go on; starting the next");
        return say("WARN supervisor pid=%d running->ended %s=%d workers=%u start=%llu in=%lldms", supervisor.pid, how,
                   supervisor.number, table_.count(), next, static_cast<long long>(delay.count()));
    }
    const bool in_order = supervisor.fate == WorkerFate::exited && supervisor.number == 0;
    say("%s supervisor pid=%d handed over %s=%d workers=%u start=%llu", in_order ? "INFO" : "WARN", supervisor.pid, how,
        supervisor.number, table_.count(), next);
    if (parting_ == Parting::upgrade && course_ == Course::serving) re_execute();
}

/// Returns only if this program goes on: the next supervisor then starts as after any hand-over,
/// and learns why.
void Keeper::re_execute() noexcept {
    station_.service_manager.status("upgrading: re-executing the keeper's program");
    upgrade_failed_ = try_to_re_execute();
    say("WARN upgrade: the old program goes on, with every worker");
}

keeper_link::UpgradeFailure Keeper::try_to_re_execute() noexcept {
    using keeper_link::UpgradeFailure;
    SavedKeeper saved{};
    saved.pid = ::getpid();
    saved.directory_fd = station_.directory.directory_fd();
    saved.listening_fd = station_.directory.listening_fd();
    saved.oom_score_worker = station_.oom_score_worker;
    saved.generation_last = generation_last_;
    saved.supervisor_starts = supervisor_.starts();
    saved.started_unix_ms = started_unix_ms_;
    saved.violations = violations_;
    saved.reload_due = outbox_.reload_is_due() ? 1 : 0;
    saved.executions = executions_;
    const UniqueFd state = write_state(saved, station_.directory.socket_path(), table_);
    if (!state) {
        say("WARN upgrade: writing the state: %s", strerrordesc_np(errno));
        return UpgradeFailure::state;
    }
    if (!station_.program.understands(state.get(), station_.spawner, station_.null.get(), station_.oom_score_own))
        return UpgradeFailure::refused;
    ::fcntl(state.get(), F_SETFD, 0);
    keep_descriptors_across_exec(true);
    station_.program.execute(state.get());
    const int error = errno;
    keep_descriptors_across_exec(false);
    say("WARN upgrade: executing %s: %s", station_.program.path(), strerrordesc_np(error));
    return UpgradeFailure::execute;
}

void Keeper::keep_descriptors_across_exec(bool kept) noexcept {
    const int flags = kept ? 0 : FD_CLOEXEC;
    ::fcntl(station_.directory.directory_fd(), F_SETFD, flags);
    ::fcntl(station_.directory.listening_fd(), F_SETFD, flags);
    for (const Worker& worker : table_.all())
        for (const int fd : {worker.pidfd.get(), worker.link.get(), worker.log.get()})
            if (fd >= 0) ::fcntl(fd, F_SETFD, flags);
}

void Keeper::on_link_closed() noexcept {
    drain_link();
    if (supervisor_.link()) supervisor_.link_closed();
}

void Keeper::on_violation(const char* what) noexcept {
    ++violations_;
    parting_ = Parting::none;  // a defect, whatever it announced: the next start is delayed
                               // as after a crash
    say("error: protocol_violation: reading the supervisor's link: %s (violation %llu); killing supervisor pid=%d",
        what, static_cast<unsigned long long>(violations_), supervisor_.pid());
    supervisor_.kill();
}

void Keeper::end(int status) noexcept {
    if (course_ == Course::serving) station_.service_manager.stopping();
    supervisor_.link().close();
    station_.directory.remove_socket();
    if (!kill_everything(table_.all(), supervisor_.runs() ? supervisor_.pid() : -1,
                         Clock::now() + limits::kill_everything_deadline))
        say("WARN some processes did not end within %lld s of SIGKILL",
            static_cast<long long>(limits::kill_everything_deadline.count() / 1000));
    exit_status_ = status;
    course_ = Course::ended;
}

}  // namespace bulkhead::keeper

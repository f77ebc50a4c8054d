#include "supervisor/keeper/process/reap.h"

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <charconv>
#include <csignal>
#include <string_view>

#include "ipc/base/pidfd.h"
#include "ipc/base/unique_fd.h"

namespace bulkhead::keeper {
namespace {

/// Kills orphans, which joined us because we are their subreaper. They have no record, but the
/// kernel lists them. Each is our unreaped child, so its pid is its own. Without
/// CONFIG_PROC_CHILDREN the list is empty.
void kill_listed_children() noexcept {
    std::array<char, 4096> text;
    const UniqueFd list{::open("/proc/thread-self/children", O_RDONLY | O_CLOEXEC)};
    if (!list) return;
    const ssize_t size = ::read(list.get(), text.data(), text.size());
    if (size <= 0) return;
    std::string_view rest{text.data(), static_cast<std::size_t>(size)};
    for (std::size_t space = rest.find(' '); space != std::string_view::npos; space = rest.find(' ')) {
        pid_t pid = 0;  // a number cut off by the buffer's end has no space: it waits for
                        // the next round
        std::from_chars(rest.data(), rest.data() + space, pid);
        if (pid > 1) signal_child(pid, SIGKILL);
        rest.remove_prefix(space + 1);
    }
}

void wait_for_sigchld(Clock::time_point deadline) noexcept {
    sigset_t sigchld;
    ::sigemptyset(&sigchld);
    ::sigaddset(&sigchld, SIGCHLD);
    const timespec timeout = until(deadline);
    ::sigtimedwait(&sigchld, nullptr, &timeout);
}

}  // namespace

std::optional<EndedChild> next_ended_child() noexcept {
    siginfo_t ended{};
    if (::waitid(P_ALL, 0, &ended, WEXITED | WNOHANG | WNOWAIT) != 0 || ended.si_pid == 0) return std::nullopt;
    return EndedChild{ended.si_pid, ended.si_code == CLD_EXITED ? WorkerFate::exited : WorkerFate::killed_by_signal,
                      ended.si_status};
}

void reap(const EndedChild& child) noexcept {
    siginfo_t ended{};
    ::waitid(P_PID, static_cast<id_t>(child.pid), &ended, WEXITED | WNOHANG);
}

void kill_group_and_reap(const EndedChild& leader) noexcept {
    signal_group(leader.pid, SIGKILL);
    reap(leader);
}

bool kill_everything(std::span<const Worker> workers, pid_t supervisor, Clock::time_point deadline) noexcept {
    if (supervisor > 0) signal_group(supervisor, SIGKILL);
    for (const Worker& worker : workers)
        if (worker.state == Worker::State::running) signal_group(worker.pid, SIGKILL);
    for (;;) {
        kill_listed_children();
        while (const auto child = next_ended_child()) reap(*child);
        siginfo_t any{};
        if (::waitid(P_ALL, 0, &any, WEXITED | WNOHANG | WNOWAIT) != 0 && errno == ECHILD) return true;
        if (Clock::now() >= deadline) return false;
        wait_for_sigchld(deadline);
    }
}

}  // namespace bulkhead::keeper

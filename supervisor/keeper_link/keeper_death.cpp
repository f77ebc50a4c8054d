#include "supervisor/keeper_link/keeper_death.h"

#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <atomic>

namespace bulkhead::supervisor {
namespace {

std::atomic<int> cgroup_kill{-1};
static_assert(std::atomic<int>::is_always_lock_free);

/// Async-signal-safe. This process is above that cgroup, not in it.
extern "C" void on_keeper_death(int) {
    [[maybe_unused]] const ssize_t written = ::write(cgroup_kill.load(), "1", 1);
    ::_exit(1);
}

}  // namespace

void end_with_keeper() noexcept {
    const int number = SIGRTMIN + 1;
    ::signal(SIGHUP, SIG_IGN);
    struct sigaction action {};
    action.sa_handler = on_keeper_death;
    ::sigfillset(&action.sa_mask);
    if (::sigaction(number, &action, nullptr) != 0) return;  // keeps SIGKILL
    sigset_t it;
    ::sigemptyset(&it);
    ::sigaddset(&it, number);
    ::pthread_sigmask(SIG_UNBLOCK, &it, nullptr);
    ::prctl(PR_SET_PDEATHSIG, number);
}

void kill_with_keeper(int cgroup_kill_fd) noexcept { cgroup_kill = cgroup_kill_fd; }

}  // namespace bulkhead::supervisor

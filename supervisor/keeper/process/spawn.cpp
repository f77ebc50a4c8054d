#include "supervisor/keeper/process/spawn.h"

#include <fcntl.h>
#include <linux/sched.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <new>

namespace bulkhead::keeper {
namespace {

/// Runs in the child. Returns only on failure, with errno set.
SpawnStep become(const SpawnRecipe& recipe, pid_t keeper_pid, std::uint64_t core_hard_limit) noexcept {
    if (::setpgid(0, 0) != 0) return SpawnStep::process_group;

    if (::prctl(PR_SET_PDEATHSIG, SIGKILL) != 0) return SpawnStep::parent_death_signal;
    if (::getppid() != keeper_pid) ::_exit(1);  // the keeper died before the line above: no
                                                // death signal comes

    int next = 0;
    for (const int fd : recipe.descriptors)
        if (::dup2(fd, next++) < 0) return SpawnStep::descriptors;
    if (::close_range(static_cast<unsigned>(next), ~0U, 0) != 0) return SpawnStep::descriptors;

    if (recipe.core_bytes_max) {
        const rlim_t bytes = std::min<rlim_t>(*recipe.core_bytes_max, core_hard_limit);
        const rlimit limit{bytes, bytes};
        if (::setrlimit(RLIMIT_CORE, &limit) != 0) return SpawnStep::limits;
    }
    set_own_oom_score(recipe.oom_score_adj);

    sigset_t none;
    ::sigemptyset(&none);
    ::sigprocmask(SIG_SETMASK, &none, nullptr);
    ::execve(recipe.program, recipe.argv, recipe.environment);
    return SpawnStep::exec;
}

}  // namespace

void set_own_oom_score(int score) noexcept {
    std::array<char, 16> text{};
    const int size = std::snprintf(text.data(), text.size(), "%d", score);
    const int fd = ::open("/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC);
    if (fd < 0) return;
    [[maybe_unused]] const ssize_t written = ::write(fd, text.data(), static_cast<std::size_t>(size));
    ::close(fd);
}

Result<Spawner> Spawner::make() {
    void* page = ::mmap(nullptr, sizeof(SpawnFailure), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (page == MAP_FAILED) return system_error("mapping the page for failures to spawn", errno);
    return Spawner{new (page) SpawnFailure};
}

Spawner::Spawner(SpawnFailure* page) noexcept : failure_{page}, keeper_pid_{::getpid()} {
    rlimit core{};
    ::getrlimit(RLIMIT_CORE, &core);
    core_hard_limit_ = core.rlim_max;
}

SpawnResult<Child> Spawner::spawn(const SpawnRecipe& recipe) noexcept {
    *failure_ = {};
    int pidfd = -1;
    clone_args arguments{};
    arguments.flags = CLONE_PIDFD | CLONE_VFORK;
    arguments.pidfd = reinterpret_cast<std::uintptr_t>(&pidfd);
    arguments.exit_signal = SIGCHLD;
    if (recipe.cgroup_fd >= 0) {
        arguments.flags |= CLONE_INTO_CGROUP;
        arguments.cgroup = static_cast<std::uint64_t>(recipe.cgroup_fd);
    }

    // Raw: glibc offers no clone3() without a separate stack; also runs no atfork handlers.
    const long pid = ::syscall(SYS_clone3, &arguments, sizeof arguments);
    if (pid < 0) return SpawnFailure{SpawnStep::clone, errno};
    if (pid == 0) {
        const SpawnStep step = become(recipe, keeper_pid_, core_hard_limit_);
        *failure_ = {step, errno};
        ::_exit(127);
    }

    Child child{static_cast<pid_t>(pid), UniqueFd{pidfd}};
    if (failure_->step == SpawnStep::none) return child;
    const SpawnFailure failure = *failure_;
    siginfo_t ended{};
    // It is already in _exit().
    ::waitid(P_PIDFD, static_cast<id_t>(child.pidfd.get()), &ended, WEXITED);
    return failure;
}

Result<UniqueFd> reserve_low_descriptors(Inherited others) {
    int fd = -1;
    do {
        fd = ::open("/dev/null", O_RDWR);
        if (fd < 0) return system_error("opening /dev/null", errno);
    } while (fd < STDERR_FILENO);
    if (fd > STDERR_FILENO) ::close(fd);
    if (others == Inherited::closed) ::close_range(STDERR_FILENO + 1, ~0U, 0);
    do {
        fd = ::open("/dev/null", O_RDWR | O_CLOEXEC);
        if (fd < 0) return system_error("opening /dev/null", errno);
    } while (fd <= keeper_link::child_listen_fd);
    return UniqueFd{fd};
}

}  // namespace bulkhead::keeper

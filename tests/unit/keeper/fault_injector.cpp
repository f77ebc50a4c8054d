#include "tests/unit/keeper/fault_injector.h"

#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstddef>
#include <vector>

#include "tests/unit/keeper/process_facts.h"

namespace bulkhead::test {
namespace {

constexpr long stoppable[] = {SYS_socketpair, SYS_pipe2,           SYS_clone3,       SYS_setpgid,
                              SYS_prctl,      system_call_of_dup2, SYS_close_range,  SYS_prlimit64,
                              SYS_execve,     SYS_sendmsg,         SYS_memfd_create, SYS_writev};

/// Returns  the listener; -1 where it is not permitted
int install_filter() {
    std::vector<sock_filter> program{BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr))};
    for (const long number : stoppable) {
        program.push_back(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, static_cast<std::uint32_t>(number), 0, 1));
        program.push_back(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_USER_NOTIF));
    }
    program.push_back(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW));
    const sock_fprog filter{static_cast<unsigned short>(program.size()), program.data()};
    ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
    return static_cast<int>(::syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_NEW_LISTENER, &filter));
}

}  // namespace

FaultInjector::FaultInjector() : quit_{::eventfd(0, EFD_CLOEXEC)} {
    std::array<int, 2> ends{};
    if (::pipe2(ends.data(), O_CLOEXEC) == 0) told_ = {UniqueFd{ends[0]}, UniqueFd{ends[1]}};
}

FaultInjector::~FaultInjector() {
    const std::uint64_t word = 1;
    (void)!::write(quit_.get(), &word, sizeof word);
    if (thread_.joinable()) thread_.join();
}

void FaultInjector::install_in_child() {
    const int listener = install_filter();
    (void)!::write(told_[1].get(), &listener, sizeof listener);
}

bool FaultInjector::attach(pid_t keeper) {
    keeper_ = keeper;
    int number = -1;
    if (!readable(told_[0].get()) || ::read(told_[0].get(), &number, sizeof number) != sizeof number || number < 0)
        return false;
    const UniqueFd process = hold(keeper);
    listener_ = UniqueFd{static_cast<int>(::syscall(SYS_pidfd_getfd, process.get(), number, 0))};
    if (!listener_) return false;  // its exec waits for an answer, until the test kills it
    thread_ = std::thread{[this] { answer_all(); }};
    return true;
}

void FaultInjector::fail(Who who, long system_call, int error_number, int times) {
    const std::lock_guard lock{mutex_};
    who_ = who;
    system_call_ = system_call;
    error_number_ = error_number;
    times_ = times;
}

int FaultInjector::left() {
    const std::lock_guard lock{mutex_};
    return times_;
}

void FaultInjector::answer_all() {
    for (;;) {
        std::array<pollfd, 2> sources{{{listener_.get(), POLLIN, 0}, {quit_.get(), POLLIN, 0}}};
        ::poll(sources.data(), sources.size(), -1);
        if (sources[1].revents != 0 || (sources[0].revents & POLLIN) == 0) return;
        seccomp_notif asked{};
        // Killed meanwhile.
        if (::ioctl(listener_.get(), SECCOMP_IOCTL_NOTIF_RECV, &asked) != 0) continue;
        seccomp_notif_resp answer{};
        answer.id = asked.id;
        answer.flags = SECCOMP_USER_NOTIF_FLAG_CONTINUE;
        {
            const std::lock_guard lock{mutex_};
            const Who who = static_cast<pid_t>(asked.pid) == keeper_ ? Who::keeper : Who::child;
            if (times_ > 0 && who == who_ && asked.data.nr == system_call_) {
                --times_;
                answer.flags = 0;
                answer.error = -error_number_;
            }
        }
        ::ioctl(listener_.get(), SECCOMP_IOCTL_NOTIF_SEND, &answer);
    }
}

}  // namespace bulkhead::test

#include "tests/faults/step_killer.h"

#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <string>

#include "tests/support/file_text.h"

namespace bulkhead::test {
namespace {

struct Told {
    pid_t pid;
    int listener;  ///< -1: not permitted
    int error;     ///< then
};

/// Returns  the listener; -1 and errno where it is not permitted
int install_filter() {
    sock_filter program[] = {BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
                             BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_sendmsg, 0, 1),
                             BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_USER_NOTIF),
                             BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)};
    const sock_fprog filter{std::size(program), program};
    ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
    return static_cast<int>(::syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_NEW_LISTENER, &filter));
}

std::array<UniqueFd, 2> make_pipe() {
    std::array<int, 2> ends{-1, -1};
    (void)!::pipe2(ends.data(), O_CLOEXEC);
    return {UniqueFd{ends[0]}, UniqueFd{ends[1]}};
}

/// In the process that is to be watched; goes on once the listener was taken.
void tell_and_wait(int told, int taken) {
    const int listener = install_filter();
    const Told words{::getpid(), listener, errno};
    (void)!::write(told, &words, sizeof words);
    char word = 0;
    (void)!::read(taken, &word, 1);  // an exec closes the listener
}

/// Returns  none, and errno, where it is not permitted
UniqueFd listener_of(const Told& told) {
    const UniqueFd process{static_cast<int>(::syscall(SYS_pidfd_open, told.pid, 0))};
    if (!process) return {};
    return UniqueFd{static_cast<int>(::syscall(SYS_pidfd_getfd, process.get(), told.listener, 0))};
}

/// The call that `asked` is about goes on.
bool let_through(int listener, const seccomp_notif& asked) {
    seccomp_notif_resp answer{};
    answer.id = asked.id;
    answer.flags = SECCOMP_USER_NOTIF_FLAG_CONTINUE;
    return ::ioctl(listener, SECCOMP_IOCTL_NOTIF_SEND, &answer) == 0;
}

std::string refused(const char* what, int error) { return std::string{what} + ": " + ::strerrordesc_np(error); }

/// Lets one call of a child that waits behind `tell_and_wait` through. Returns why that cannot be;
/// empty: it was done
std::string watch_one_call(int told, int taken) {
    Told words{};
    if (::read(told, &words, sizeof words) != sizeof words) return "the child that tries it died";
    if (words.listener < 0) return refused("a seccomp filter that asks", words.error);
    const UniqueFd listener = listener_of(words);
    if (!listener) return refused("pidfd_getfd()", errno);
    (void)!::write(taken, "", 1);
    pollfd source{listener.get(), POLLIN, 0};
    seccomp_notif asked{};
    if (::poll(&source, 1, -1) != 1 || ::ioctl(listener.get(), SECCOMP_IOCTL_NOTIF_RECV, &asked) != 0)
        return refused("receiving what the filter asks", errno);
    return let_through(listener.get(), asked) ? "" : refused("SECCOMP_USER_NOTIF_FLAG_CONTINUE", errno);
}

std::string try_on_a_child() {
    auto told = make_pipe(), taken = make_pipe();
    const pid_t child = ::fork();
    if (child < 0) return refused("fork()", errno);
    if (child == 0) {
        tell_and_wait(told[1].get(), taken[0].get());
        ::_exit(::syscall(SYS_sendmsg, -1, nullptr, 0) == -1 && errno == EBADF ? 0 : 1);
    }
    told[1].reset();
    std::string why = watch_one_call(told[0].get(), taken[1].get());
    if (!why.empty()) ::kill(child, SIGKILL);
    int status = 0;
    ::waitpid(child, &status, 0);
    if (why.empty() && status != 0) why = "a call that was let through did not end as it would have";
    return why;
}

/// The kernel cuts a name after 15 bytes.
bool is_supervisor(pid_t pid) { return file_text("/proc/" + std::to_string(pid) + "/comm") == "bulkhead-superv\n"; }

}  // namespace

StepKiller::StepKiller()
    : told_{make_pipe()}, taken_{make_pipe()}, quit_{::eventfd(0, EFD_CLOEXEC)}, thread_{[this] { answer_all(); }} {}

StepKiller::~StepKiller() {
    const std::uint64_t word = 1;
    (void)!::write(quit_.get(), &word, sizeof word);
    thread_.join();
}

void StepKiller::install_in_child() { tell_and_wait(told_[1].get(), taken_[0].get()); }

const std::string& StepKiller::refusal() {
    static const std::string why = try_on_a_child();
    return why;
}

bool StepKiller::works() {
    const std::lock_guard lock{mutex_};
    return works_;
}

void StepKiller::kill_at(int step, pid_t but_not) {
    const std::lock_guard lock{mutex_};
    steps_left_ = step;
    but_not_ = but_not;
    killed_ = -1;
}

pid_t StepKiller::killed() {
    const std::lock_guard lock{mutex_};
    return killed_;
}

bool StepKiller::take_listener() {
    std::array<pollfd, 2> sources{{{told_[0].get(), POLLIN, 0}, {quit_.get(), POLLIN, 0}}};
    ::poll(sources.data(), sources.size(), -1);
    Told told{};
    if (sources[1].revents != 0 || ::read(told_[0].get(), &told, sizeof told) != sizeof told) return false;
    if (told.listener >= 0) listener_ = listener_of(told);
    const std::lock_guard lock{mutex_};
    works_ = static_cast<bool>(listener_);
    (void)!::write(taken_[1].get(), "", 1);
    return works_;
}

bool StepKiller::is_due(pid_t pid) {
    const std::lock_guard lock{mutex_};
    if (steps_left_ == 0 || pid == but_not_ || !is_supervisor(pid) || --steps_left_ > 0) return false;
    killed_ = pid;
    return true;
}

void StepKiller::answer_all() {
    if (!take_listener()) return;
    for (;;) {
        std::array<pollfd, 2> sources{{{listener_.get(), POLLIN, 0}, {quit_.get(), POLLIN, 0}}};
        ::poll(sources.data(), sources.size(), -1);
        if (sources[1].revents != 0 || (sources[0].revents & POLLIN) == 0) return;
        seccomp_notif asked{};
        // Killed meanwhile.
        if (::ioctl(listener_.get(), SECCOMP_IOCTL_NOTIF_RECV, &asked) != 0) continue;
        if (is_due(static_cast<pid_t>(asked.pid))) {
            ::kill(static_cast<pid_t>(asked.pid), SIGKILL);
            continue;  // it waits for an answer until it is dead
        }
        (void)let_through(listener_.get(), asked);
    }
}

}  // namespace bulkhead::test

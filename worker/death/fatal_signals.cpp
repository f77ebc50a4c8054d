#include "worker/death/fatal_signals.h"

#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <ucontext.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <string_view>

#include "worker/death/backtrace_packet.h"

namespace bulkhead::worker {
namespace {

/// Enough for the handler, the unwinder, and the kernel's copy of wide registers
/// (AVX-512, AMX: 12 KiB).
constexpr std::size_t stack_bytes = 64 * 1024;

/// For a backtrace that waits for the dynamic linker's lock, which the failing thread
/// may itself hold.
constexpr timeval backtrace_deadline{.tv_sec = 0, .tv_usec = 500'000};
/// How long a second failing thread lets the first one finish.
constexpr int second_failure_wait_ms = 1'000;

struct LastWords {
    int signal;
    std::string_view packet;
};

constexpr std::array<LastWords, 5> last_words{{
    {SIGSEGV, R"({"type":"dying","signal":11})"},
    {SIGABRT, R"({"type":"dying","signal":6})"},
    {SIGBUS, R"({"type":"dying","signal":7})"},
    {SIGFPE, R"({"type":"dying","signal":8})"},
    {SIGILL, R"({"type":"dying","signal":4})"},
}};
static_assert(SIGSEGV == 11 && SIGABRT == 6 && SIGBUS == 7 && SIGFPE == 8 && SIGILL == 4);

std::atomic<int> link{-1};
std::atomic<pid_t> owner{0};                   ///< the process that installed the handlers; a
                                               ///< forked child has them too
std::array<std::atomic<pid_t>, 2> suspects{};  ///< by kind of work
std::atomic<bool> suspect_asked{false};
std::atomic<pid_t> teller{0};  ///< the only thread that reports
std::atomic<int> first_signal{0};
static_assert(std::atomic<int>::is_always_lock_free && std::atomic<bool>::is_always_lock_free);

pid_t this_thread() noexcept { return static_cast<pid_t>(::syscall(SYS_gettid)); }

void say(std::string_view packet) noexcept {
    ::send(link.load(), packet.data(), packet.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
}

/// Takes the default action. Raises the signal again, because one sent by a process does not recur.
void end_by(int number) noexcept {
    sigset_t it;
    ::sigemptyset(&it);
    ::sigaddset(&it, number);
    ::signal(number, SIG_DFL);
    ::pthread_sigmask(SIG_UNBLOCK, &it, nullptr);
    ::raise(number);
}

extern "C" void on_backtrace_deadline(int) { end_by(first_signal.load()); }

void start_deadline() noexcept {
    struct sigaction action {};
    action.sa_handler = on_backtrace_deadline;
    action.sa_flags = SA_ONSTACK;
    ::sigemptyset(&action.sa_mask);
    ::sigaction(SIGALRM, &action, nullptr);
    const itimerval once{.it_interval = {}, .it_value = backtrace_deadline};
    ::setitimer(ITIMER_REAL, &once, nullptr);
}

const void* fault_of(const void* context) noexcept {
    [[maybe_unused]] const auto& machine = static_cast<const ucontext_t*>(context)->uc_mcontext;
#if defined(__x86_64__)
    return reinterpret_cast<const void*>(machine.gregs[REG_RIP]);
#elif defined(__aarch64__)
    return reinterpret_cast<const void*>(machine.pc);
#else
    return nullptr;
#endif
}

/// Asks another thread to report: the suspect, or the main thread if there is none. True if asked.
/// The receiver of the signal may be an idle thread of a library.
bool hand_to_suspect(const siginfo_t& signal) noexcept {
    const bool sent_by_another = signal.si_code <= 0 && signal.si_pid != ::getpid();
    pid_t thread = ::getpid();
    for (const auto& suspect : suspects)
        if (const pid_t suspected = suspect.load(); suspected != 0) thread = suspected;
    if (!sent_by_another || thread == this_thread() || suspect_asked.exchange(true)) return false;
    return ::syscall(SYS_tgkill, ::getpid(), thread, SIGABRT) == 0;
}

extern "C" void on_fatal_signal(int number, siginfo_t* information, void* context) {
    const int errno_before = errno;
    if (::getpid() != owner.load()) return end_by(number);  // a forked child's death is
                                                            // not the worker's
    if (number == SIGABRT && hand_to_suspect(*information)) {
        errno = errno_before;
        return;
    }
    pid_t other = 0;
    if (teller.compare_exchange_strong(other, this_thread())) {
        first_signal = number;
        for (const auto& [signal, packet] : last_words)
            if (signal == number) say(packet);
        start_deadline();
        say(backtrace_packet(number, fault_of(context)));
    } else if (other != this_thread()) {
        ::poll(nullptr, 0, second_failure_wait_ms);
    }  // else the report itself failed: the stack cannot be read
    end_by(first_signal.load());
}

}  // namespace

SignalStack::SignalStack() : bytes_{new std::byte[stack_bytes]} {
    stack_t stack{};
    stack.ss_sp = bytes_.get();
    stack.ss_size = stack_bytes;
    ::sigaltstack(&stack, nullptr);
}

SignalStack::~SignalStack() {
    stack_t none{};
    none.ss_flags = SS_DISABLE;
    ::sigaltstack(&none, nullptr);
}

void report_fatal_signals(int link_fd) noexcept {
    link = link_fd;
    owner = ::getpid();
    prepare_backtrace();
    struct sigaction action {};
    action.sa_sigaction = on_fatal_signal;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    ::sigemptyset(&action.sa_mask);
    for (const LastWords& words : last_words) ::sigaction(words.signal, &action, nullptr);
}

HangSuspect::HangSuspect(Doing doing) noexcept : doing_{doing} {
    static thread_local const pid_t thread = this_thread();
    suspects[static_cast<std::size_t>(doing_)] = thread;
}

HangSuspect::~HangSuspect() { suspects[static_cast<std::size_t>(doing_)] = 0; }

}  // namespace bulkhead::worker

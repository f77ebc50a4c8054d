#include "worker/fatal_signals.h"

#include <signal.h>
#include <sys/socket.h>

#include <array>
#include <atomic>
#include <string_view>

namespace bulkhead::worker {
namespace {

/// Enough for the handler and for what the kernel saves of wide registers (AVX-512, AMX: some 12 KiB).
constexpr std::size_t stack_bytes = 64 * 1024;

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
static_assert(std::atomic<int>::is_always_lock_free);

extern "C" void on_fatal_signal(int number) {
    for (const auto& [signal, packet] : last_words)
        if (signal == number) ::send(link.load(), packet.data(), packet.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
    // SA_RESETHAND has restored the default; raised here too, for a signal that somebody sent does not come again.
    ::raise(number);
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
    struct sigaction action {};
    action.sa_handler = on_fatal_signal;
    action.sa_flags = SA_ONSTACK | SA_RESETHAND | SA_NODEFER;
    ::sigemptyset(&action.sa_mask);
    for (const LastWords& words : last_words) ::sigaction(words.signal, &action, nullptr);
}

}  // namespace bulkhead::worker

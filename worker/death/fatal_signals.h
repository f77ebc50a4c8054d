#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>

namespace bulkhead::worker {

/// The calling thread's stack for signal handlers, so that an overflow of its own stack is reported, too.
class SignalStack {
public:
    SignalStack();
    ~SignalStack();
    SignalStack(const SignalStack&) = delete;
    SignalStack& operator=(const SignalStack&) = delete;

private:
    std::unique_ptr<std::byte[]> bytes_;
};

/// From now on SIGSEGV, SIGABRT, SIGBUS, SIGFPE and SIGILL write a `dying` packet on `link_fd`, then a `backtrace`,
/// before they end the process as they would have: the kernel closes sockets only after it has freed the memory, 100
/// to 200 ms later for some GB. Nothing in the handler allocates, and what it may wait for is bounded.
///
/// A SIGABRT from another process asks where this one hangs. The thread of the `HangSuspect` reports, else the main
/// thread.
void report_fatal_signals(int link_fd) noexcept;

/// While this lives, the calling thread works on something that may hang: a SIGABRT from another process, whichever
/// thread receives it, is about this one. One at a time of each kind; who handles an event is suspected first.
class HangSuspect {
public:
    enum class Doing : std::uint8_t { serves, handles };

    explicit HangSuspect(Doing doing = Doing::serves) noexcept;
    ~HangSuspect();
    HangSuspect(const HangSuspect&) = delete;
    HangSuspect& operator=(const HangSuspect&) = delete;

private:
    Doing doing_;
};

}  // namespace bulkhead::worker

#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace bulkhead::worker {

/// The calling thread's alternate signal stack, so that a stack overflow is reported too.
class SignalStack {
public:
    SignalStack();
    ~SignalStack();
    SignalStack(const SignalStack&) = delete;
    SignalStack& operator=(const SignalStack&) = delete;

private:
    std::unique_ptr<std::byte[]> bytes_;
};

/// Installs handlers for SIGSEGV, SIGABRT, SIGBUS, SIGFPE and SIGILL. Each writes a `dying` packet
/// and a `backtrace` to `link_fd`, then ends the process by that signal. Without the packet, the
/// daemon learns of the death only when the kernel closes sockets, 100 to 200 ms later for some GB
/// of memory. The handler allocates nothing, and its waits are bounded.
///
/// A SIGABRT from another process asks where this one hangs. The `HangSuspect`'s thread reports,
/// else the main thread.
void report_fatal_signals(int link_fd) noexcept;

/// Marks the calling thread as doing work that may hang. If another process sends SIGABRT, this
/// thread is the one reported, whichever thread receives it. One at a time of each kind; an event
/// handler is suspected first.
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

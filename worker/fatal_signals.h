#pragma once

#include <cstddef>
#include <memory>

namespace bulkhead::worker {

/// The calling thread's stack for signal handlers, so that an overflow of its own stack can be told as well.
class SignalStack {
public:
    SignalStack();
    ~SignalStack();
    SignalStack(const SignalStack&) = delete;
    SignalStack& operator=(const SignalStack&) = delete;

private:
    std::unique_ptr<std::byte[]> bytes_;
};

/// From now on SIGSEGV, SIGABRT, SIGBUS, SIGFPE and SIGILL write one `dying` packet on `link_fd` before they end
/// the process as they would have: the kernel closes sockets only after it has freed the memory, 100 to 200 ms
/// later for some GB. The handler only sends and re-raises, which is all that is safe there.
void report_fatal_signals(int link_fd) noexcept;

}  // namespace bulkhead::worker

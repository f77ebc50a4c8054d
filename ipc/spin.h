#pragma once

#include <chrono>

namespace bulkhead {

/// Which end of a channel asks: where two CPUs are all there is, only the client spins.
enum class SpinSide { client, worker };

/// `asked` as far as spinning helps: not at all where this thread's affinity mask leaves no CPU for the peer.
[[nodiscard]] std::chrono::microseconds spin_allowed(std::chrono::microseconds asked, SpinSide side);

/// Looks again and again without a system call until `done()` or the deadline; what `done()` said last.
template <typename Done>
[[nodiscard]] bool spin_until(std::chrono::steady_clock::time_point deadline, Done done) {
    for (;;) {
        for (int i = 0; i < 64; ++i) {  // reading the clock costs more than looking
            if (done()) return true;
#if defined(__x86_64__)
            __builtin_ia32_pause();
#endif
        }
        if (std::chrono::steady_clock::now() >= deadline) return done();
    }
}

}  // namespace bulkhead

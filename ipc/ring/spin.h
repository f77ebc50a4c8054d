#pragma once

#include <chrono>
#include <optional>

namespace bulkhead {

/// Which end of a channel asks: where two CPUs are all there is, only the client spins.
enum class SpinSide { client, worker };

/// `asked` as far as spinning helps: not at all where this thread's affinity mask leaves no CPU for the peer.
[[nodiscard]] std::chrono::microseconds spin_allowed(std::chrono::microseconds asked, SpinSide side);

/// Looks again and again without a system call until `done()`, or for so long; what `done()` said last. The clock is
/// read only after the first 64 looks: a peer that is quick is seen without it.
template <typename Done>
[[nodiscard]] bool spin_for(std::chrono::microseconds time, Done done) {
    std::optional<std::chrono::steady_clock::time_point> until;
    for (;;) {
        for (int i = 0; i < 64; ++i) {
            if (done()) return true;
#if defined(__x86_64__)
            __builtin_ia32_pause();
#endif
        }
        const auto now = std::chrono::steady_clock::now();
        if (!until) until = now + time;
        if (now >= *until) return done();
    }
}

}  // namespace bulkhead

#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

namespace bulkhead::soak {

/// See make_fleet.
inline constexpr std::array<std::string_view, 4> kinds{"minimal", "minimal-gpu", "gpu-slabs", "real"};

struct Options {
    std::string model = "minimal";  ///< one of `kinds`
    std::int64_t worker_kills = 0;
    std::int64_t supervisor_kills = 0;
    std::int64_t client_kills = 0;  ///< while they hold leases; others come on top
    std::int64_t memory_histories = 0;
    std::int64_t swap_seconds = 0;  ///< that models which exclude each other are used for
    int workers = 30;          ///< under a supervisor that is killed
    int clients = 4;           ///< that stream all the while, or so many side by side
                               ///< that are killed
    int pause_ms = 0;          ///< of a client that streams, between an answer and its next request
    int life_ms_max = 400;     ///< a supervisor is killed at a random moment of its first so
                               ///< many milliseconds
    std::int64_t minutes = 0;  ///< ends earlier than the counts say; 0: no bound
    std::uint64_t seed = 1;
};

/// load → infer → SIGKILL, again and again; every death must be told to the client as worker_lost.
/// Returns  what went wrong: unexpected answers and drifted resources
int kill_workers(const Options& options);

/// SIGKILL to supervisors at random moments of their lives, while clients stream
/// through all workers.
int kill_supervisors(const Options& options);

/// SIGKILL to clients that hold leases of both slabs and have a request in flight, so many times as
/// was asked for, and to others at any moment before that, while one that nobody kills is served.
/// Of a model "gpu-slabs" the leases lie on the GPU, else on the host.
int kill_clients(const Options& options);

/// Random lives of a fleet under the memory policy, on a simulated machine: each with another seed.
int live_memory_histories(const Options& options);

/// Three models that do not fit together, two clients each: every request must be answered within
/// its deadline, every unload verified, and the workers never hold more than the limit, by the
/// kernel's or the fake driver's account. A fourth that leaks is ended at its bound, alone. See
/// make_swap_fleet.
int swap_models(const Options& options);

}  // namespace bulkhead::soak

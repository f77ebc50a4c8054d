#pragma once

#include <vector>

#include "config/fleet.h"

namespace bulkhead::worker {

/// The cores that this process may run on, at least 1; read at the first call.
[[nodiscard]] int allowed_cores();

/// The declared number, else the cores that this process may run on.
[[nodiscard]] int inference_threads(const config::ModelSpec& spec);

/// OpenMP keeps the number for each thread that starts a parallel region, and a package's kernels ask OpenMP, not
/// LibTorch: so every thread that loads or infers sets its own, once.
void use_threads(int count);

/// For each thread of a team of `count` one of `cores`, where there are as many and more than one, and each process
/// begins at another; else empty: the kernel places them.
[[nodiscard]] std::vector<int> team_places(int count, const std::vector<int>& cores, int process);

/// Gives each thread of the calling thread's team, itself included, its core of `team_places`. For a thread whose work
/// is hundreds of short parallel regions: on busy cores the kernel wakes one thread on another's core, and each then
/// waits for the other's time slice to end.
///
/// Thread  the one that will run the model; what it starts afterwards stays on its core
void bind_team(int count);

}  // namespace bulkhead::worker

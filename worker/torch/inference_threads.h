#pragma once

#include <vector>

#include "config/fleet.h"

namespace bulkhead::worker {

/// Returns the number of cores that this process may use, at least 1, as read at the first call.
[[nodiscard]] int allowed_cores();

/// Returns the declared number, else `allowed_cores`.
[[nodiscard]] int inference_threads(const config::ModelSpec& spec);

/// Sets the calling thread's number of OpenMP threads. OpenMP keeps it for each thread that starts
/// a parallel region, and a package's kernels ask OpenMP, not LibTorch: so call it on each thread
/// that loads or infers.
void use_threads(int count);

/// Assigns one of `cores` to each of `count` threads, if there are enough and `count` > 1; each
/// process starts at another core. Else empty: the kernel places them.
[[nodiscard]] std::vector<int> team_places(int count, const std::vector<int>& cores, int process);

/// Binds each thread of the caller's team, itself included, to its core of `team_places`. For a
/// thread that runs hundreds of short parallel regions: on busy cores the kernel wakes one thread
/// on another's core, and each then waits for the other's time slice to end.
///
/// Thread  the one that will run the model; threads it starts later stay on its core
void bind_team(int count);

}  // namespace bulkhead::worker

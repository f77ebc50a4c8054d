#pragma once

#include "config/fleet.h"

namespace bulkhead::worker {

/// The cores that this process may run on, at least 1; read at the first call.
[[nodiscard]] int allowed_cores();

/// The declared number, else the cores that this process may run on.
[[nodiscard]] int inference_threads(const config::ModelSpec& spec);

/// OpenMP keeps the number for each thread that starts a parallel region, and a package's kernels ask OpenMP, not
/// LibTorch: so every thread that loads or infers sets its own, once.
void use_threads(int count);

/// Gives each thread of the calling thread's team, itself included, a core of its own, where the team is as large as
/// the cores that this process may run on; else does nothing. For a thread whose work is hundreds of short parallel
/// regions: on busy cores the kernel wakes one thread on another's core, and each then waits for the other's time slice
/// to end. Each process begins at another core.
///
/// Thread  the one that will run the model; what it starts afterwards stays on its core
void bind_team(int count);

}  // namespace bulkhead::worker

#pragma once

#include "config/fleet.h"

namespace bulkhead::worker {

/// So many this process may run on, 1 at least; as it was when first asked.
[[nodiscard]] int allowed_cores();

/// As many as declared, else as many as this process may run on.
[[nodiscard]] int inference_threads(const config::ModelSpec& spec);

/// OpenMP keeps the number for each thread that starts a parallel region, and a package's kernels ask OpenMP, not
/// LibTorch: so every thread that loads or infers sets its own, once.
void use_threads(int count);

/// Gives each thread of the calling thread's team, itself included, a core of its own, where the team is as large as the
/// cores that this process may run on; else does nothing. For a thread whose work is hundreds of short parallel regions:
/// the kernel wakes the one where the other runs, as soon as no core has been idle for long, and there each waits for
/// the other's slice to end. Which core is the first differs from process to process.
///
/// Thread  the one that will run the model; what it starts afterwards stays on its core
void bind_team(int count);

}  // namespace bulkhead::worker

#pragma once

#include "config/fleet.h"

namespace bulkhead::worker {

/// So many this process may run on, 1 at least.
[[nodiscard]] int allowed_cores();

/// As many as declared, else as many as this process may run on.
[[nodiscard]] int inference_threads(const config::ModelSpec& spec);

/// OpenMP keeps the number for each thread that starts a parallel region, and a package's kernels ask OpenMP, not
/// LibTorch: so every thread that loads or infers sets its own, once.
void use_threads(int count);

}  // namespace bulkhead::worker

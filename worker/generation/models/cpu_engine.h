#pragma once

#include <memory>

#include "worker/generation/models/package.h"

namespace bulkhead::worker::generation {

/// Makes the engine of a CPU, which calls the package's functions and the sampler in order. One
/// graph of dynamic sizes serves all attention lengths; a step attends over the length of its
/// longest sequence.
///
/// Throws  ErrorException: out_of_memory; what LibTorch throws
[[nodiscard]] std::unique_ptr<Engine> make_cpu_engine(Parts parts);

}  // namespace bulkhead::worker::generation

#pragma once

#include <memory>

#include "worker/generation/models/package.h"

namespace bulkhead::worker::generation {

/// The engine of a CPU: the package's functions and the sampler, called in order. One graph of dynamic sizes serves all
/// attention lengths, and a step attends over what the longest of its sequences holds.
///
/// Throws  ErrorException: out_of_memory; what LibTorch throws
[[nodiscard]] std::unique_ptr<Engine> make_cpu_engine(Parts parts);

}  // namespace bulkhead::worker::generation

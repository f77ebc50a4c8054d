#pragma once

#include <memory>

#include <c10/cuda/CUDAStream.h>

#include "worker/generation/models/package.h"

namespace bulkhead::worker::cuda {

/// The engine of a GPU. A step is one graph: inputs from the slots' states, decode, sampler, states; captured at load
/// for 1, 2, 4, 8 … sequences times each attention length, largest first, in one pool. State, parameters and results
/// lie at fixed addresses, so graphs are not captured again. The host launches a step before it has read the one
/// before: results come through pinned memory that the GPU writes, in turns.
///
/// Nothing of it is ever freed: unloading is the process' end.
///
/// Thread  that of the requests
/// Errors  out_of_memory, of a capture too where graphs are `required`; capture_failed where they are
[[nodiscard]] Result<std::unique_ptr<generation::Engine>> make_generation_engine(generation::Parts parts,
                                                                                 config::Graphs graphs,
                                                                                 const LoadContext& context,
                                                                                 c10::cuda::CUDAStream stream);

}  // namespace bulkhead::worker::cuda

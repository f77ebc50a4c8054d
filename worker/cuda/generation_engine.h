#pragma once

#include <memory>

#include <c10/cuda/CUDAStream.h>

#include "worker/generation/models/package.h"

namespace bulkhead::worker::cuda {

/// Makes the engine of a GPU. One graph runs a whole step: inputs from the slots' states, decode,
/// sampler, states. The load captures it for 1, 2, 4, 8 … sequences times each attention length,
/// largest first, in one pool. State, parameters and results have fixed addresses, so graphs are
/// never captured again. The host launches a step before it has read the previous one; the GPU
/// writes results to pinned buffers in turn.
///
/// Nothing is freed before the process ends.
///
/// Thread  the requests' thread
/// Errors  out_of_memory, also during capture if graphs are `required`; capture_failed if they are
[[nodiscard]] Result<std::shared_ptr<generation::Engine>> make_generation_engine(generation::Parts parts,
                                                                                 config::Graphs graphs,
                                                                                 const LoadContext& context,
                                                                                 c10::cuda::CUDAStream stream);

}  // namespace bulkhead::worker::cuda

#pragma once

#include <cstdint>

#include "worker/generation/engine.h"

namespace bulkhead::worker::generation {

/// Tries a new engine before use: a prompt of two positions, and a step of 1, 2, 4 … sequences.
/// Undoes all effects.
///
/// `longest_chunk`  if > 0, first computes the last `longest_chunk` positions of the longest
/// prompt: their attention needs more memory than anything else, and no graph holds it
/// Thread  the executor
/// Errors  as Engine; package_incompatible if a prompt of tokens gives logits that are not finite
[[nodiscard]] Result<> try_once(Engine& engine, std::uint32_t longest_chunk);

}  // namespace bulkhead::worker::generation

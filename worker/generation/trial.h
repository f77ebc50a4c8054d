#pragma once

#include <cstdint>

#include "worker/generation/engine.h"

namespace bulkhead::worker::generation {

/// Tries a new engine before anyone relies on it: a prompt of two positions, and a step of 1, 2, 4 … sequences. Takes
/// back what this leaves behind.
///
/// `longest_chunk`  where > 0, first the last so many positions of the longest prompt: their attention asks for more
///                  memory than anything else, and no graph holds it
/// Thread  the executor
/// Errors  as Engine; package_incompatible where a prompt of tokens gives logits that are not finite
[[nodiscard]] Result<> try_once(Engine& engine, std::uint32_t longest_chunk);

}  // namespace bulkhead::worker::generation

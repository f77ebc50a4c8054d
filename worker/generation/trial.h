#pragma once

#include <cstdint>
#include <vector>

#include "worker/generation/engine.h"

namespace bulkhead::worker::generation {

/// What a device asks to be tried.
struct Trial {
    /// Where > 0, first the last so many positions of the longest prompt: their attention asks for more memory than
    /// anything else, and no graph holds it.
    std::uint32_t longest_chunk = 0;
    /// Prompts of so many positions, so that no request is the first one of its size: a library compiles itself a
    /// kernel for each size that it meets.
    std::vector<std::uint32_t> prompts{};
};

/// The sizes of prompt that a CPU's functions meet: they pad to multiples of 32 (clients/python/bulkhead/export,
/// products.py), and get `chunk` positions at most. Beyond 128 only `chunk` itself: each size takes its time.
[[nodiscard]] std::vector<std::uint32_t> padded_prompts(std::uint32_t chunk);

/// Tries a new engine before anyone relies on it: what `trial` says, a prompt of two positions, and a step of 1, 2, 4 …
/// sequences. What all this leaves behind is taken back.
///
/// Thread  the executor
/// Errors  as Engine; package_incompatible where a prompt of tokens gives logits that are not finite
[[nodiscard]] Result<> try_once(Engine& engine, const Trial& trial);

}  // namespace bulkhead::worker::generation

#pragma once

/// LibTorch's side: builds the exported functions' host arguments, except KV and span.

#include <vector>

#include <ATen/core/Tensor.h>

#include "worker/generation/models/manifest.h"

namespace bulkhead::worker::generation {

/// Returns how many rows, at least `count`, a chunk gets on a GPU: a power of two or the function's
/// maximum, so that prompts of all lengths use few sizes.
[[nodiscard]] std::int64_t static_rows(const Manifest::Prefill& prefill, std::int64_t count);

/// Returns prefill's arguments for the prompt's positions [first, first + count): prompt,
/// positions, span, [rope], extras. All are contiguous; without rearranging they stay in the
/// client's memory. Omitted inputs are zeros, an omitted `rope` the plain positions. The last
/// position is repeated until there are `rows` rows, or the graph's minimum: it is computed and
/// written again with the same result, and stays the last. `span` is 0, 1, … on any device, as long
/// as the attention, at least first + count: KV behind the chunk is masked, but must be numbers.
[[nodiscard]] std::vector<at::Tensor> prompt_chunk(const Manifest& manifest, const Prompt& prompt, std::int64_t first,
                                                   std::int64_t count, std::int64_t rows, const at::Tensor& span);

/// What decode adds to positions after this prompt, by the manifest's rule.
[[nodiscard]] std::int64_t rope_delta_of(const Manifest& manifest, const Prompt& prompt);

/// The ids at position `index` of a prompt of tokens, [1, C]; for packages without a prefill.
[[nodiscard]] at::Tensor prompt_tokens(const Manifest& manifest, const Prompt& prompt, std::int64_t index);

}  // namespace bulkhead::worker::generation

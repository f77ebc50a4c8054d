#pragma once

/// LibTorch's side: the arguments of the exported functions, on the host, KV and span aside.

#include <vector>

#include <ATen/core/Tensor.h>

#include "worker/generation/models/manifest.h"

namespace bulkhead::worker::generation {

/// The rows that a chunk of `count` positions has on a GPU, count at least: a power of two or the function's most, so
/// that prompts of all lengths meet few sizes.
[[nodiscard]] std::int64_t static_rows(const Manifest::Prefill& prefill, std::int64_t count);

/// Prefill's arguments for the prompt's positions [first, first + count): prompt, positions, span, [rope], extras. All
/// are contiguous; where no rearranging is needed they lie where the client put them. An input that the request left
/// out is zeros, and `rope` the plain positions. The last position stands there again until there are `rows`, or as
/// many as the graph takes at least: that computes and writes the same again, and it is still the last. `span` is 0, 1,
/// … on whichever device, as many as the attention is long, at least first + count: what the KV holds behind the chunk
/// is masked, and must be numbers.
[[nodiscard]] std::vector<at::Tensor> prompt_chunk(const Manifest& manifest, const Prompt& prompt, std::int64_t first,
                                                   std::int64_t count, std::int64_t rows, const at::Tensor& span);

/// What decode adds to positions after this prompt, as the package's manifest says.
[[nodiscard]] std::int64_t rope_delta_of(const Manifest& manifest, const Prompt& prompt);

/// The ids of position `index` of a prompt of tokens, [1, C]: for packages without a prefill.
[[nodiscard]] at::Tensor prompt_tokens(const Manifest& manifest, const Prompt& prompt, std::int64_t index);

}  // namespace bulkhead::worker::generation

#pragma once

#include <cstdint>
#include <string>

#include "worker/generation/models/manifest.h"

namespace bulkhead::worker::generation {

/// Bytes of the KV of all slots.
[[nodiscard]] std::uint64_t kv_bytes(const Manifest& manifest, const Shape& shape);

/// Whether weights (0 where they need no memory of their own) and KV fit into what is free, and a little for the step.
/// Errors  out_of_memory: what is needed and what is free; the remedy names slots, lengths and dtypes that would fit
[[nodiscard]] Result<> check_fit(const Manifest& manifest, const Shape& shape, std::uint64_t weights_bytes,
                                 std::uint64_t free_bytes, const std::string& where);

/// `error`, if it is out_of_memory: of a load that `check_fit` let through, so it is the steps, or the graphs of them,
/// that found too little left beside weights and KV. Says what was left; the remedy names slots, lengths and dtypes
/// that would leave more, and how much. Other errors stay as they are.
[[nodiscard]] Error say_what_leaves_more(Error error, const Manifest& manifest, const Shape& shape,
                                         std::uint64_t weights_bytes, std::uint64_t free_bytes);

/// Host memory that this process may still take: what the system has available, or what its cgroups leave, if less.
[[nodiscard]] std::uint64_t free_host_bytes();

}  // namespace bulkhead::worker::generation

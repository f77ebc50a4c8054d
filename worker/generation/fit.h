#pragma once

#include <cstdint>
#include <string>

#include "worker/generation/manifest.h"

namespace bulkhead::worker::generation {

/// Bytes of the KV of all slots.
[[nodiscard]] std::uint64_t kv_bytes(const Manifest& manifest, const Shape& shape);

/// Whether weights (0 where they need no memory of their own) and KV fit into what is free, and a little for the step.
/// Errors  out_of_memory: what is needed and what is free; the remedy names slots, lengths and dtypes that would fit
[[nodiscard]] Result<> check_fit(const Manifest& manifest, const Shape& shape, std::uint64_t weights_bytes,
                                 std::uint64_t free_bytes, const std::string& where);

/// Host memory that this process may still take: what the system has available, or what its cgroup leaves, if less.
[[nodiscard]] std::uint64_t free_host_bytes();

}  // namespace bulkhead::worker::generation

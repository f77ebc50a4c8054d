#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "worker/generation/models/manifest.h"

namespace bulkhead::worker::generation {

/// Bytes of the KV of all slots.
[[nodiscard]] std::uint64_t kv_bytes(const Manifest& manifest);

/// Checks that weights (0 if they need no memory of their own), KV and a small reserve for the step
/// fit into `free_bytes`.
/// Errors  out_of_memory: needed and free bytes; the remedy names slots, lengths and dtypes
///         that would fit
[[nodiscard]] Result<> check_fit(const Manifest& manifest, std::uint64_t weights_bytes, std::uint64_t free_bytes,
                                 const std::string& where);

/// Rewrites an out_of_memory `error` of a load that `check_fit` accepted: the steps or their graphs
/// found too little memory beside weights and KV. Tells what was left; the remedy names slots,
/// lengths and dtypes that leave more, and how much. Other errors stay as they are.
[[nodiscard]] Error say_what_leaves_more(Error error, const Manifest& manifest, std::uint64_t weights_bytes,
                                         std::uint64_t free_bytes);

/// Host memory that this process may still take: the lesser of what the system and its
/// cgroups leave.
[[nodiscard]] std::uint64_t free_host_bytes();

/// Returns the bytes that this process' cgroups still allow: the remainder of the tightest limit,
/// of its own folder or one above, in either version's hierarchy; the largest number without a
/// limit. The page cache counts as free: the kernel drops it, and mapped weights, when it needs
/// memory.
///
/// `mountinfo`, `cgroup`  the texts of these files in /proc/self
[[nodiscard]] std::uint64_t cgroup_room(std::string_view mountinfo, std::string_view cgroup);

}  // namespace bulkhead::worker::generation

#pragma once

#include <cstdint>
#include <string_view>

namespace bulkhead::worker::generation {

/// Returns the bytes that this process' cgroups still allow: the remainder of the tightest limit,
/// of its own folder or one above, in either version's hierarchy; the largest number without a
/// limit. The page cache counts as free: the kernel drops it, and mapped weights, when it needs
/// memory.
///
/// `mountinfo`, `cgroup`  the texts of these files in /proc/self
[[nodiscard]] std::uint64_t cgroup_room(std::string_view mountinfo, std::string_view cgroup);

}  // namespace bulkhead::worker::generation

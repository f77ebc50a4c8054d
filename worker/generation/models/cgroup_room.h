#pragma once

#include <cstdint>
#include <string_view>

namespace bulkhead::worker::generation {

/// Bytes that the cgroups of this process leave it: what is left of the tightest limit, its own folder's or one above,
/// in either version's hierarchy; the largest number without a limit. The page cache does not count as used: the kernel
/// drops it, and mapped weights, when memory is needed.
///
/// `mountinfo`, `cgroup`  the texts of the files of these names in /proc/self
[[nodiscard]] std::uint64_t cgroup_room(std::string_view mountinfo, std::string_view cgroup);

}  // namespace bulkhead::worker::generation

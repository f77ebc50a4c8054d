#pragma once

#include <cstdint>
#include <string_view>

namespace bulkhead::worker::generation {

/// Bytes that the cgroups of this process leave it: what is left of the tightest limit, its own folder's or one above, in
/// either version's hierarchy; the largest number where there is no limit. Of what they use, the page cache does not
/// count: the kernel drops it for whoever needs room, as it does mapped weights.
/// `mountinfo`, `cgroup`  the texts of the files of these names in /proc/self
[[nodiscard]] std::uint64_t cgroup_room(std::string_view mountinfo, std::string_view cgroup);

}  // namespace bulkhead::worker::generation

#pragma once

#include <filesystem>
#include <optional>
#include <string_view>

namespace bulkhead {

/// Returns this process' folder in a mounted cgroup hierarchy, from the texts of
/// /proc/self/mountinfo and /proc/self/cgroup. Empty if there is none, or it is not visible here.
/// `controller`  of version 1, such as "memory"; empty: the hierarchy of version 2 (of
///               hybrid systems too)
[[nodiscard]] std::optional<std::filesystem::path> own_cgroup(std::string_view mountinfo, std::string_view cgroup,
                                                              std::string_view controller = {});

}  // namespace bulkhead

#include "worker/generation/models/cgroup_room.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <limits>
#include <string>

#include "ipc/base/own_cgroup.h"

namespace bulkhead::worker::generation {
namespace {

namespace fs = std::filesystem;

constexpr std::uint64_t unlimited = std::numeric_limits<std::uint64_t>::max();

/// A cgroup version's names. In version 1, memory.stat counts child folders under other names.
struct Version {
    std::string_view controller;
    const char* limit;
    const char* used;
    std::string_view active_file;
    std::string_view inactive_file;
};
constexpr Version versions[] = {
    {"", "memory.max", "memory.current", "active_file", "inactive_file"},
    {"memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_active_file", "total_inactive_file"},
};

/// Returns `otherwise` if the file is missing or holds no number ("max").
std::uint64_t read_number(const fs::path& path, std::uint64_t otherwise) {
    std::ifstream file{path};
    std::uint64_t value = 0;
    return file >> value ? value : otherwise;
}

std::uint64_t page_cache(const fs::path& folder, const Version& version) {
    std::ifstream file{folder / "memory.stat"};
    std::uint64_t bytes = 0;
    std::string name;
    for (std::uint64_t value = 0; file >> name >> value;)
        if (name == version.active_file || name == version.inactive_file) bytes += value;
    return bytes;
}

std::uint64_t room_in(const fs::path& folder, const Version& version) {
    const std::uint64_t limit = read_number(folder / version.limit, unlimited);
    if (limit == unlimited) return unlimited;
    const std::uint64_t used = read_number(folder / version.used, 0);
    const std::uint64_t kept = used - std::min(used, page_cache(folder, version));
    return limit - std::min(limit, kept);
}

}  // namespace

std::uint64_t cgroup_room(std::string_view mountinfo, std::string_view cgroup) {
    std::uint64_t room = unlimited;
    for (const Version& version : versions)
        if (const auto own = own_cgroup(mountinfo, cgroup, version.controller))
            for (fs::path folder = *own; folder.has_relative_path(); folder = folder.parent_path())
                // Above the mount the file is missing.
                room = std::min(room, room_in(folder, version));
    return room;
}

}  // namespace bulkhead::worker::generation

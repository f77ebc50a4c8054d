#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>

namespace bulkhead::worker {

/// Reads all files below `folder` that are not in memory yet, so that mapping them later does not
/// wait for a disk. Calls `progress` with `done` of `total` bytes after each chunk. Skips what is
/// in memory, at the cost of the check. Ignores unreadable files: their loader reports the error.
void read_ahead(const std::filesystem::path& folder,
                const std::function<void(std::uint64_t done, std::uint64_t total)>& progress);

}  // namespace bulkhead::worker

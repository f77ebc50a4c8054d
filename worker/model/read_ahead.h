#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>

namespace bulkhead::worker {

/// Reads all files below `folder` that are not in memory yet, so that whoever maps them next does not wait for a disk,
/// and tells how far that is: `done` of `total` bytes after each chunk. What is in memory already is skipped at the
/// cost of looking. A file that cannot be read is left to its loader, which says why.
void read_ahead(const std::filesystem::path& folder,
                const std::function<void(std::uint64_t done, std::uint64_t total)>& progress);

}  // namespace bulkhead::worker

#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "config/fleet.h"

namespace bulkhead::supervisor {

/// How much of some files is in the page cache.
struct CachedFiles {
    std::uint64_t bytes = 0;   ///< size of all files
    std::uint64_t cached = 0;  ///< see `bulkhead::cached_bytes`
};

/// Returns the files that a load of the model reads: all in a folder; for an AOTInductor package,
/// the files that the package cache has unpacked. Empty if there are none.
/// `package_cache`  see make_package_cache
[[nodiscard]] std::vector<std::filesystem::path> weight_files(const config::ModelSpec& model,
                                                              const std::filesystem::path& package_cache);

/// Counts the cached bytes and asks the kernel to read missing ones, at most `read_max` bytes.
/// `posix_fadvise` submits the reads without waiting for them. Blocks for the disk.
[[nodiscard]] CachedFiles read_ahead(const std::vector<std::filesystem::path>& files, std::uint64_t read_max);

}  // namespace bulkhead::supervisor

#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "config/fleet.h"

namespace bulkhead::supervisor {

/// What of some files is in the page cache.
struct CachedFiles {
    std::uint64_t bytes = 0;   ///< of all of them
    std::uint64_t cached = 0;  ///< see `bulkhead::cached_bytes`
};

/// The files that a load of the model reads: of a folder all in it, of an AOTInductor package what the package cache
/// has unpacked of it. Empty where there are none.
/// `package_cache`  see make_package_cache
[[nodiscard]] std::vector<std::filesystem::path> weight_files(const config::ModelSpec& model,
                                                              const std::filesystem::path& package_cache);

/// Counts, and asks the kernel to read what is missing, at most `read_max` bytes of it: `posix_fadvise` submits the
/// reads and does not wait for them.
/// Blocks for the disk.
[[nodiscard]] CachedFiles read_ahead(const std::vector<std::filesystem::path>& files, std::uint64_t read_max);

}  // namespace bulkhead::supervisor

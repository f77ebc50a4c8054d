#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "ipc/base/error.h"
#include "worker/package/package_archive.h"

namespace bulkhead::worker {

/// Bytes of all files together.
[[nodiscard]] std::uint64_t total_bytes(const std::vector<UnpackedFile>& files);

/// Writes `manifest.json` into a folder of unpacked files, last: it marks the folder as complete.
[[nodiscard]] Result<> write_manifest(const std::filesystem::path& folder, const std::vector<UnpackedFile>& files);

/// Reads it back. Empty if it is missing or was not written by `write_manifest`.
[[nodiscard]] std::vector<UnpackedFile> read_manifest(const std::filesystem::path& folder);

/// Returns the first listed file, or the manifest, that differs from what was unpacked; empty if
/// the folder is complete. A file with the manifest's size and change time is not read again: any
/// write would have changed that time.
[[nodiscard]] std::string damaged_file(const std::filesystem::path& folder);

}  // namespace bulkhead::worker

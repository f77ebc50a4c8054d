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

/// Writes `manifest.json` last into a folder of unpacked files: with it the folder is whole.
[[nodiscard]] Result<> write_manifest(const std::filesystem::path& folder, const std::vector<UnpackedFile>& files);

/// Reads it back. Empty when it is missing, or not one that `write_manifest` writes.
[[nodiscard]] std::vector<UnpackedFile> read_manifest(const std::filesystem::path& folder);

/// The first listed file that is not there as it was unpacked, or the manifest itself; empty when the folder is whole.
/// A file whose size and change time are those of the manifest is not read again: any write would have moved the
/// change time.
[[nodiscard]] std::string damaged_file(const std::filesystem::path& folder);

}  // namespace bulkhead::worker

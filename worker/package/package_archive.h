#pragma once

#include <sys/stat.h>

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "ipc/base/error.h"
#include "worker/file/model_file.h"

namespace bulkhead::worker {

struct UnpackedFile {
    std::string path;  ///< below the target folder
    std::uint64_t size_bytes = 0;
    std::string sha256;
    std::int64_t changed_ns = 0;  ///< st_ctim after it was fully written
};

/// When the file last changed in any way; no program can set this time back.
[[nodiscard]] inline std::int64_t changed_ns(const struct stat& status) noexcept {
    return status.st_ctim.tv_sec * 1'000'000'000LL + status.st_ctim.tv_nsec;
}

/// Writes AOTInductor's files (`data/aotinductor/…`) below `target`: files 0600, folders 0700,
/// all synced to disk on return. Skips exported programs and sample inputs, which a package
/// may contain too.
///
/// Errors  load_failed for a broken archive, one without AOTInductor files, or one whose names lead
///         out of `target`; resources_exhausted if the disk is full
[[nodiscard]] Result<std::vector<UnpackedFile>> unpack_archive(const ModelFile& package,
                                                               const std::filesystem::path& target,
                                                               const std::function<void(std::uint64_t)>& progress);

}  // namespace bulkhead::worker

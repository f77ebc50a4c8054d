#pragma once

#include <sys/stat.h>

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "ipc/base/error.h"
#include "worker/torch/model_file.h"

namespace bulkhead::worker {

struct UnpackedFile {
    std::string path;  ///< below the target folder
    std::uint64_t size_bytes = 0;
    std::string sha256;
    std::int64_t changed_ns = 0;  ///< st_ctim when it was whole
};

/// When anything about the file was changed last; no program can set it back.
[[nodiscard]] inline std::int64_t changed_ns(const struct stat& status) noexcept {
    return status.st_ctim.tv_sec * 1'000'000'000LL + status.st_ctim.tv_nsec;
}

/// Writes what AOTInductor put into a package (`data/aotinductor/…`) below `target`, files 0600, folders 0700,
/// all of it on disk when it returns. Exported programs and sample inputs, which a package may carry too, stay.
///
/// Errors  load_failed for a broken archive, none of AOTInductor's, or one whose names lead out of `target`;
///         resources_exhausted when the disk is full
[[nodiscard]] Result<std::vector<UnpackedFile>> unpack_archive(const ModelFile& package,
                                                               const std::filesystem::path& target,
                                                               const std::function<void(std::uint64_t)>& progress);

}  // namespace bulkhead::worker

#pragma once

#include <sys/stat.h>

#include <string>

#include <fmt/format.h>

namespace bulkhead {

/// Identifies one state of a file: changes with each write. The package cache names
/// its links by it.
[[nodiscard]] inline std::string file_identity(const struct stat& status) {
    return fmt::format("{:x}-{}-{}-{}.{:09}-{}.{:09}", status.st_dev, status.st_ino, status.st_size,
                       status.st_mtim.tv_sec, status.st_mtim.tv_nsec, status.st_ctim.tv_sec, status.st_ctim.tv_nsec);
}

}  // namespace bulkhead

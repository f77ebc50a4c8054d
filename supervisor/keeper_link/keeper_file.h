#pragma once

#include <filesystem>
#include <optional>
#include <string>

#include "supervisor/base/json_members.h"

namespace bulkhead::supervisor {

/// A small JSON object that one supervisor leaves to the next in a file beside the logs. Most
/// are valid only under the keeper that they were written under: nothing is taken over from
/// another daemon.
///
/// Blocks for the disk, so keep it small.
class KeeperFile {
public:
    enum class Of : std::uint8_t { this_keeper, every_keeper };
    /// The keeper is the parent of the calling process.
    /// `loss`  what it means if the file cannot be written
    KeeperFile(std::filesystem::path path, const char* loss, Of whose = Of::this_keeper);

    /// Replaces the file whole or not at all; logs a line if it cannot. Survives a crash of the
    /// supervisor, but perhaps not a power failure.
    void save(json::object content) const;
    /// Empty if there is no file, it is another keeper's, or it is unreadable (logs a warning).
    [[nodiscard]] std::optional<json::object> load() const;

    [[nodiscard]] const std::filesystem::path& path() const noexcept { return path_; }

private:
    std::filesystem::path path_;
    const char* loss_;
    std::string keeper_;  ///< pid and start time, unchanged by an upgrade in place
};

}  // namespace bulkhead::supervisor

#pragma once

#include <filesystem>
#include <optional>
#include <string>

#include "ipc/base/error.h"
#include "supervisor/base/json_members.h"

namespace bulkhead::supervisor {

/// A small JSON object that one supervisor leaves to the next in a file beside the logs. Most are valid
/// only under the keeper that they were written under: nothing is taken over from another daemon.
///
/// Blocks for the disk, so keep it small.
class KeeperFile {
public:
    enum class Of : std::uint8_t { this_keeper, every_keeper };
    /// The keeper is the parent of the calling process.
    explicit KeeperFile(std::filesystem::path path, Of whose = Of::this_keeper);

    /// Replaces the file whole or not at all. Survives a crash of the supervisor, but perhaps not a power failure.
    [[nodiscard]] Result<> save(json::object content) const;
    /// Empty if there is no file, it is another keeper's, or it is unreadable (logs a warning).
    [[nodiscard]] std::optional<json::object> load() const;

    [[nodiscard]] const std::filesystem::path& path() const noexcept { return path_; }

private:
    std::filesystem::path path_;
    std::string keeper_;  ///< pid and start time, unchanged by an upgrade in place
};

}  // namespace bulkhead::supervisor

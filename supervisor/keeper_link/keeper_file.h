#pragma once

#include <filesystem>
#include <optional>
#include <string>

#include "ipc/base/error.h"
#include "supervisor/base/json_members.h"

namespace bulkhead::supervisor {

/// A small object of JSON that one supervisor leaves to the next in a file beside the logs. Most are only of use under
/// the keeper that they were written under: of another daemon nothing is to be taken over.
///
/// Blocks for the disk, which is why it is small.
class KeeperFile {
public:
    enum class Of : std::uint8_t { this_keeper, every_keeper };
    /// The keeper is the parent of the calling process.
    explicit KeeperFile(std::filesystem::path path, Of whose = Of::this_keeper);

    /// Replaces the file whole or not at all. A supervisor's crash does not lose it, a power failure may.
    [[nodiscard]] Result<> save(json::object content) const;
    /// Empty when there is none, it is another keeper's, or, with a warning in the log, when it cannot be read.
    [[nodiscard]] std::optional<json::object> load() const;

    [[nodiscard]] const std::filesystem::path& path() const noexcept { return path_; }

private:
    std::filesystem::path path_;
    std::string keeper_;  ///< pid and start time, which an upgrade in place keeps
};

}  // namespace bulkhead::supervisor

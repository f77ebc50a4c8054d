#pragma once

#include <filesystem>
#include <optional>

namespace bulkhead::supervisor {

/// `<runtime folder>/logs`, made with mode 0700; empty, with a warning, where it cannot be made.
[[nodiscard]] std::optional<std::filesystem::path> make_log_folder(const std::filesystem::path& runtime_folder);

/// The daemon's own log: bulkheadd.log in the folder, rotating, and standard error where that is a terminal
/// or there is no folder.
void open_daemon_log(const std::optional<std::filesystem::path>& folder);

}  // namespace bulkhead::supervisor

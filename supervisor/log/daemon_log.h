#pragma once

#include <filesystem>
#include <optional>
#include <string>

#include "supervisor/log/log_writer.h"

namespace bulkhead::supervisor {

/// `<runtime folder>/logs`, made with mode 0700; empty, with a warning, where it cannot be made.
[[nodiscard]] std::optional<LogStore> make_log_store(const std::filesystem::path& runtime_folder);

/// The daemon's own log: bulkheadd.log in the store, rotating, and standard error where that is a terminal or there is
/// no store. No line waits for either.
void open_daemon_log(const std::optional<LogStore>& store);

/// A line for whoever has started this program. It does not wait for them either.
void say_on_standard_error(std::string line);

/// Writes what waits, in the store too. False: as `LogWriter::end`.
[[nodiscard]] bool end_daemon_log(const std::optional<LogStore>& store);

}  // namespace bulkhead::supervisor

#pragma once

#include <filesystem>
#include <optional>
#include <string>

#include "supervisor/log/log_writer.h"

namespace bulkhead::supervisor {

/// Creates `<runtime folder>/logs` with mode 0700; empty, with a warning, if that fails.
[[nodiscard]] std::optional<LogStore> make_log_store(const std::filesystem::path& runtime_folder);

/// Opens the daemon's log: bulkheadd.log in the store, rotating, and standard error if that is a
/// terminal or there is no store. Logging waits for neither.
void open_daemon_log(const std::optional<LogStore>& store);

/// Prints a line for the person who started this program. Does not wait for the terminal.
void say_on_standard_error(std::string line);

/// Writes all waiting lines, also those of the store. False: as `LogWriter::end`.
[[nodiscard]] bool end_daemon_log(const std::optional<LogStore>& store);

}  // namespace bulkhead::supervisor

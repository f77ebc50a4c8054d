#pragma once

#include <filesystem>

namespace bulkhead::cli::top {

/// Draws the fleet once, with rates over one second. With `as_json`, prints one document.
/// Returns 0, a command's exit status. Throws  ErrorException, as `ControlClient`
[[nodiscard]] int show_once(const std::filesystem::path& socket, bool as_json);

/// Prints the rows every second until the reader or the daemon has gone.
[[nodiscard]] int print_rows(const std::filesystem::path& socket);

/// Runs the full screen until the user quits. Waits for a daemon that goes away.
/// Throws  ErrorException: input_invalid without a terminal; not_running if no daemon
///         runs at the start
[[nodiscard]] int run_screen(const std::filesystem::path& socket);

/// Whether standard input and output are a terminal that supports drawing.
[[nodiscard]] bool has_screen();

}  // namespace bulkhead::cli::top

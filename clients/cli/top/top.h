#pragma once

#include <filesystem>

namespace bulkhead::cli::top {

/// Draws the fleet once, with rates over one second. With `as_json` one document.
/// Returns 0, a command's exit status. Throws  ErrorException, as `ControlClient`
[[nodiscard]] int show_once(const std::filesystem::path& socket, bool as_json);

/// Prints the same again every second, until nobody reads it or the daemon is gone.
[[nodiscard]] int print_rows(const std::filesystem::path& socket);

/// The full screen, until the person leaves it. A daemon that goes away is waited for.
/// Throws  ErrorException: input_invalid without a terminal; not_running where there is no daemon at the start
[[nodiscard]] int run_screen(const std::filesystem::path& socket);

/// Whether standard input and output are a terminal that can be drawn on.
[[nodiscard]] bool has_screen();

}  // namespace bulkhead::cli::top

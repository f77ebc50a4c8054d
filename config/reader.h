#pragma once

#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "config/fleet.h"
#include "ipc/base/error.h"

namespace bulkhead::config {

/// One thing wrong with a fleet file, where a person can find it.
struct Diagnostic {
    std::filesystem::path file;
    int line = 0;    ///< from 1
    int column = 0;  ///< from 1
    Error error;     ///< code is config_invalid; attempt says what was read
    /// "file:line:column: attempt; remedy"
    [[nodiscard]] std::string text() const;
};

struct ReadFleet {
    Fleet fleet;                          ///< meaningful only without errors
    std::vector<Diagnostic> diagnostics;  ///< all of the file's errors at once, in its order
    std::vector<Diagnostic> warnings;     ///< what is read but has no effect, in the same order
    [[nodiscard]] bool ok() const noexcept { return diagnostics.empty(); }
};

/// Reads and checks a fleet file; relative model paths are taken from the file's folder.
[[nodiscard]] ReadFleet read_fleet(const std::filesystem::path& file);

/// The same for text that is not a file yet; `name` stands in the diagnostics.
[[nodiscard]] ReadFleet read_fleet_text(std::string_view yaml, const std::filesystem::path& name);

}  // namespace bulkhead::config

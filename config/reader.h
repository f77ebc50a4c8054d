#pragma once

#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "config/fleet.h"
#include "ipc/base/error.h"

namespace bulkhead::config {

/// One error in a fleet file, with its place for a person to find.
struct Diagnostic {
    std::filesystem::path file;
    int line = 0;    ///< from 1
    int column = 0;  ///< from 1
    Error error;     ///< code is config_invalid; attempt says what was read
    /// "file:line:column: attempt; remedy"
    [[nodiscard]] std::string text() const;
};

struct ReadFleet {
    std::string text;                     ///< of the file
    Fleet fleet;                          ///< meaningful only without errors
    std::vector<Diagnostic> diagnostics;  ///< all errors of the file, in its order
    std::vector<Diagnostic> warnings;     ///< values that have no effect, in the same order
    [[nodiscard]] bool ok() const noexcept { return diagnostics.empty(); }
};

/// Reads and checks a fleet file; relative model paths are relative to its folder.
[[nodiscard]] ReadFleet read_fleet(const std::filesystem::path& file);

/// Must the models' files exist? The daemon checks when it loads a fleet file. A worker does not:
/// loading the model gives the better error. Nor does a supervisor that goes on with its last good
/// fleet.
enum class FileCheck { must_exist, none };

/// As `read_fleet`, for text that is not a file; diagnostics show `name`.
/// `check`  of the models' files
[[nodiscard]] ReadFleet read_fleet_text(std::string_view yaml, const std::filesystem::path& name,
                                        FileCheck check = FileCheck::must_exist);

}  // namespace bulkhead::config

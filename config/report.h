#pragma once

#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "config/reader.h"

namespace bulkhead::config {

/// Where a value was read: line from 1, column from 1 in bytes, as yaml-cpp counts; line 0 if it
/// came from no file.
struct SourceLocation {
    int line = 0;
    int column = 0;
};

/// Collects the errors of one file, up to `limits::diagnostics_max`.
class Report {
public:
    Report(std::filesystem::path file, std::string_view text) : file_{std::move(file)}, text_{text} {}

    void add(SourceLocation location, std::string_view attempt, std::string_view remedy);
    /// Adds a warning: the value is read but has no effect. Warnings beyond the bound are dropped.
    void warn(SourceLocation location, std::string_view attempt, std::string_view remedy);
    /// Returns the errors in the order of the file; an aliased node that was read twice is
    /// reported once.
    [[nodiscard]] std::vector<Diagnostic> take() &&;
    /// As `take`, for warnings.
    [[nodiscard]] std::vector<Diagnostic> take_warnings() &&;

private:
    [[nodiscard]] Diagnostic diagnostic(SourceLocation location, std::string_view attempt,
                                        std::string_view remedy) const;
    [[nodiscard]] int column_in_characters(SourceLocation location) const;

    std::filesystem::path file_;
    std::string_view text_;
    std::vector<Diagnostic> diagnostics_;
    std::vector<Diagnostic> warnings_;
};

/// Returns the first 60 bytes of a text, for a message.
[[nodiscard]] std::string cut(std::string_view text);
/// As `cut`, in quotes.
[[nodiscard]] std::string in_quotes(std::string_view text);

/// Returns `did you mean "x"?` if one of `known` is similar, else `known: a, b, c`.
[[nodiscard]] std::string suggestion(std::string_view text, std::span<const std::string_view> known);

}  // namespace bulkhead::config

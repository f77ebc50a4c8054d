#pragma once

#include <filesystem>
#include <initializer_list>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "config/reader.h"

namespace bulkhead::config {

/// Where something was read: line from 1, column from 1, counted in bytes as yaml-cpp does; line 0 for a value
/// that came from no file.
struct SourceLocation {
    int line = 0;
    int column = 0;
};

/// Collects what is wrong with one file, up to `limits::diagnostics_max`.
class Report {
public:
    Report(std::filesystem::path file, std::string_view text) : file_{std::move(file)}, text_{text} {}

    void add(SourceLocation place, std::string_view attempt, std::string_view remedy);
    /// Of what is read but has no effect: the file is as good without it. Those beyond the bound are not told.
    void warn(SourceLocation place, std::string_view attempt, std::string_view remedy);
    /// In the order of the file; an aliased node that was read twice is reported once.
    [[nodiscard]] std::vector<Diagnostic> take() &&;
    /// The same for warnings.
    [[nodiscard]] std::vector<Diagnostic> take_warnings() &&;

private:
    [[nodiscard]] Diagnostic diagnostic(SourceLocation place, std::string_view attempt, std::string_view remedy) const;
    [[nodiscard]] int column_in_characters(SourceLocation place) const;

    std::filesystem::path file_;
    std::string_view text_;
    std::vector<Diagnostic> diagnostics_;
    std::vector<Diagnostic> warnings_;
};

/// What was read, for a message: its first 60 bytes.
[[nodiscard]] std::string cut(std::string_view text);
/// The same in quotes.
[[nodiscard]] std::string in_quotes(std::string_view text);

/// `did you mean "x"?` when one of `known` is near, else `known: a, b, c`.
[[nodiscard]] std::string suggestion(std::string_view text, std::span<const std::string_view> known);

}  // namespace bulkhead::config

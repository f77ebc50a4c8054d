#include "config/report.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <tuple>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "config/limits.h"
#include "ipc/base/text.h"

namespace bulkhead::config {
namespace {

/// Counts the edits (insert, delete, replace, swap of neighbours) that turn one word
/// into the other.
std::size_t edit_distance(std::string_view a, std::string_view b) {
    std::vector<std::size_t> before;  // two rows above, for the swap
    std::vector<std::size_t> above(b.size() + 1);
    std::iota(above.begin(), above.end(), std::size_t{0});
    for (std::size_t i = 1; i <= a.size(); ++i) {
        std::vector<std::size_t> row(b.size() + 1, i);
        for (std::size_t j = 1; j <= b.size(); ++j) {
            row[j] = std::min({row[j - 1] + 1, above[j] + 1, above[j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1)});
            if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
                row[j] = std::min(row[j], before[j - 2] + 1);
        }
        before = std::exchange(above, std::move(row));
    }
    return above.back();
}

std::vector<Diagnostic> in_order_of_file(std::vector<Diagnostic> all) {
    const auto key = [](const Diagnostic& d) { return std::tie(d.line, d.column); };
    std::ranges::stable_sort(all, [&](const auto& a, const auto& b) { return key(a) < key(b); });
    const auto same = [&](const auto& a, const auto& b) { return key(a) == key(b) && a.error == b.error; };
    all.erase(std::unique(all.begin(), all.end(), same), all.end());
    return all;
}

}  // namespace

void Report::add(SourceLocation location, std::string_view attempt, std::string_view remedy) {
    if (diagnostics_.size() == limits::diagnostics_max)
        diagnostics_.push_back(diagnostic(location, fmt::format("more than {} errors", limits::diagnostics_max),
                                          "correct those above first; what follows was not listed"));
    if (diagnostics_.size() > limits::diagnostics_max) return;
    diagnostics_.push_back(diagnostic(location, attempt, remedy));
}

void Report::warn(SourceLocation location, std::string_view attempt, std::string_view remedy) {
    if (warnings_.size() < limits::diagnostics_max)
        warnings_.push_back(diagnostic(location, attempt, remedy));
}

std::vector<Diagnostic> Report::take() && { return in_order_of_file(std::move(diagnostics_)); }

std::vector<Diagnostic> Report::take_warnings() && { return in_order_of_file(std::move(warnings_)); }

Diagnostic Report::diagnostic(SourceLocation location, std::string_view attempt, std::string_view remedy) const {
    // A path such as `inputs.x.dtype` contains keys as written: escape them.
    return {file_, location.line, column_in_characters(location),
            Error{ErrorCode::config_invalid, escaped(attempt), escaped(remedy)}};
}

int Report::column_in_characters(SourceLocation location) const {
    std::size_t start = 0;
    for (int line = 1; line < location.line && start != std::string_view::npos; ++line) {
        start = text_.find('\n', start);
        if (start != std::string_view::npos) ++start;
    }
    if (location.line == 0 || start == std::string_view::npos) return location.column;
    const std::string_view before = text_.substr(start, static_cast<std::size_t>(std::max(location.column - 1, 0)));
    return 1 + static_cast<int>(std::ranges::count_if(before, std::not_fn(is_continuation)));
}

std::string cut(std::string_view text) {
    const std::string_view shown = cut_to(text, 60);
    return std::string{shown} + (shown.size() < text.size() ? "…" : "");
}

std::string in_quotes(std::string_view text) { return bulkhead::in_quotes(cut(text)); }

std::string suggestion(std::string_view text, std::span<const std::string_view> known) {
    const std::string_view word = text.substr(0, 64);  // bounded: the cost is the product
                                                       // of both lengths
    std::string_view nearest;
    std::size_t least = std::max<std::size_t>(word.size() / 3, 1) + 1;
    for (const std::string_view candidate : known)
        if (const std::size_t distance = edit_distance(word, candidate); distance < least) {
            least = distance;
            nearest = candidate;
        }
    if (!nearest.empty()) return fmt::format("did you mean \"{}\"?", nearest);
    return fmt::format("known here: {}", fmt::join(known, ", "));
}

}  // namespace bulkhead::config

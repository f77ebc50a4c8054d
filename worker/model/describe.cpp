#include "worker/model/describe.h"

#include <algorithm>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "config/scalars.h"

namespace bulkhead::worker {

std::string describe(std::span<const std::int64_t> dims) { return fmt::format("[{}]", fmt::join(dims, ", ")); }

std::string describe(const std::vector<config::DimRange>& shape) {
    std::vector<std::string> dims;
    for (const auto& range : shape) dims.push_back(config::dim_text(range));
    return fmt::format("[{}]", fmt::join(dims, ", "));
}

std::string with_article(config::ParameterType type) {
    return fmt::format("{} {}", type == config::ParameterType::integer ? "an" : "a", config::word_of(type));
}

std::string_view trimmed(std::string_view text) {
    const auto first = text.find_first_not_of(" \t\r\n\v\f");
    if (first == std::string_view::npos) return {};
    return text.substr(first, text.find_last_not_of(" \t\r\n\v\f") - first + 1);
}

bool in_ranges(std::span<const std::int64_t> dims, const std::vector<config::DimRange>& shape) {
    return std::ranges::equal(dims, shape, [](std::int64_t dim, const config::DimRange& range) {
        return range.min <= dim && dim <= range.max;
    });
}

std::string shortened(std::string_view text) {
    constexpr std::size_t length_max = 60;
    return text.size() <= length_max ? std::string{text} : std::string{text.substr(0, length_max)} + "…";
}

}  // namespace bulkhead::worker

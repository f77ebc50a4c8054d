#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "config/fleet.h"

/// How the worker's errors spell declared and received values.
namespace bulkhead::worker {

[[nodiscard]] std::string describe(std::span<const std::int64_t> dims);            ///< "[1, 512]"
/// "[1, 1..256]".
[[nodiscard]] std::string describe(const std::vector<config::DimRange>& shape);
[[nodiscard]] std::string with_article(config::ParameterType type);                ///< "an integer"
/// Without the white space around it.
[[nodiscard]] std::string_view trimmed(std::string_view text);
/// Whether each dim lies in its declared range.
[[nodiscard]] bool in_ranges(std::span<const std::int64_t> dims, const std::vector<config::DimRange>& shape);
/// A peer's text, truncated to fit into a sentence.
[[nodiscard]] std::string shortened(std::string_view text);

}  // namespace bulkhead::worker

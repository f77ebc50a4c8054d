#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <boost/json.hpp>

#include "config/fleet.h"

/// How the worker spells declared and received values.
namespace bulkhead::worker {

[[nodiscard]] std::string describe(std::span<const std::int64_t> dims);  ///< "[1, 512]"
/// "[1, 1..256]".
[[nodiscard]] std::string describe(const std::vector<config::DimRange>& shape);
[[nodiscard]] std::string with_article(config::ParameterType type);  ///< "an integer"
/// Without the white space around it.
[[nodiscard]] std::string_view trimmed(std::string_view text);
/// Whether each dim lies in its declared range.
[[nodiscard]] bool in_ranges(std::span<const std::int64_t> dims, const std::vector<config::DimRange>& shape);
/// A peer's text, truncated to fit into a sentence.
[[nodiscard]] std::string shortened(std::string_view text);

/// Describes a model's methods for `welcome` and `ready`: `{"forward": {"inputs": [{"name",
/// "dtype", "shape"}], "parameters": [{"name", "type", "default"}], "outputs": […]}}`. A shape's
/// entries are numbers, "1..256" for a range, or "n=1..256" with a name.
[[nodiscard]] boost::json::object describe_methods(std::span<const config::MethodSpec> methods);

}  // namespace bulkhead::worker

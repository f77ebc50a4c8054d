#pragma once

#include <span>

#include <boost/json.hpp>

#include "config/fleet.h"

namespace bulkhead::worker {

/// Describes a model's methods for `welcome` and `ready`: `{"forward": {"inputs": [{"name",
/// "dtype", "shape"}], "parameters": [{"name", "type", "default"}], "outputs": […]}}`. A shape's
/// entries are numbers, "1..256" for a range, or "n=1..256" with a name.
[[nodiscard]] boost::json::object describe_methods(std::span<const config::MethodSpec> methods);

}  // namespace bulkhead::worker

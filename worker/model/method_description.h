#pragma once

#include <span>

#include <boost/json.hpp>

#include "config/fleet.h"

namespace bulkhead::worker {

/// What `welcome` and `ready` say about a model's methods:
/// `{"forward": {"inputs": [{"name", "dtype", "shape"}], "parameters": [{"name", "type", "default"}], "outputs":
/// […]}}`. A shape's entries are numbers, "1..256" where a range is allowed, or "n=1..256" with a name.
[[nodiscard]] boost::json::object describe_methods(std::span<const config::MethodSpec> methods);

}  // namespace bulkhead::worker

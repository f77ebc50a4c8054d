#pragma once

#include <vector>

#include "config/fields.h"
#include "config/fleet.h"

namespace bulkhead::config {

/// Reads what one method declares: inputs, parameters, outputs, buckets, padding, warmup. The keys may stand
/// under the method's name or, for a model with the one method `forward`, directly under the model; then
/// `fields` holds the model's other keys too, and its caller finishes it.
[[nodiscard]] MethodSpec read_method(Fields& fields, std::string name, const std::string& where);

/// The map `methods`.
[[nodiscard]] std::vector<MethodSpec> read_methods(const Value& methods, const std::string& where);

}  // namespace bulkhead::config

#pragma once

#include <vector>

#include "config/fields.h"
#include "config/fleet.h"

namespace bulkhead::config {

/// Reads one method's declaration: inputs, parameters, outputs, buckets, padding, warmup. The keys
/// stand under the method's name or, if the model's only method is `forward`, directly under the
/// model; then `fields` holds the model's other keys too, and the caller calls its `finish`.
[[nodiscard]] MethodSpec read_method(Fields& fields, std::string name);

/// Reads the map `methods`.
[[nodiscard]] std::vector<MethodSpec> read_methods(const Value& methods, const std::string& where);

}  // namespace bulkhead::config

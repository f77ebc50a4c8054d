#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "config/fields.h"
#include "config/fleet.h"
#include "config/reader.h"

namespace bulkhead::config {

/// Reads the keys that `defaults` can hold into `model`. Values of the file override the defaults;
/// the maps `deadlines`, `channel` and `environment` are merged key by key.
void read_settings(Fields& fields, const std::string& where, ModelSpec& model);

/// Reads one model into `model`, which has the defaults and its name. Relative paths are
/// relative to `folder`.
void read_model(Fields& fields, const std::string& where, const std::filesystem::path& folder, FileCheck check,
                ModelSpec& model);

/// Reads one method's declaration: inputs, parameters, outputs, buckets, padding, warmup. The keys
/// stand under the method's name or, if the model's only method is `forward`, directly under the
/// model; then `fields` holds the model's other keys too, and the caller calls its `finish`.
[[nodiscard]] MethodSpec read_method(Fields& fields, std::string name);

/// Reads the map `methods`.
[[nodiscard]] std::vector<MethodSpec> read_methods(const Value& methods, const std::string& where);

/// Reads what a fleet file says beside its models. Call after the models were read.
void read_fleet_settings(Fields& fields, Fleet& fleet);

}  // namespace bulkhead::config

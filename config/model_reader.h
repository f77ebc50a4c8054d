#pragma once

#include <filesystem>

#include "config/fields.h"
#include "config/fleet.h"

namespace bulkhead::config {

/// Must the model's file exist? The daemon checks when it loads a fleet file. A worker does not:
/// loading the model gives the better error.
enum class FileCheck { must_exist, none };

/// Reads the keys that `defaults` can hold into `model`. Values of the file override the defaults;
/// the maps `deadlines`, `channel` and `environment` are merged key by key.
void read_settings(Fields& fields, const std::string& where, ModelSpec& model);

/// Reads one model into `model`, which has the defaults and its name. Relative paths are relative to `folder`.
void read_model(Fields& fields, const std::string& where, const std::filesystem::path& folder, FileCheck check,
                ModelSpec& model);

}  // namespace bulkhead::config

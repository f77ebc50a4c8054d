#pragma once

#include <filesystem>

#include "config/fields.h"
#include "config/fleet.h"

namespace bulkhead::config {

/// Whether a model's file must exist: the daemon that loads a fleet file looks, a worker that was sent its
/// model does not, because loading it tells more.
enum class FileCheck { must_exist, none };

/// Reads the keys that `defaults` may hold over what `model` already has: those of the file win over the
/// defaults, and the maps `deadlines`, `channel` and `environment` are merged key by key.
void read_settings(Fields& fields, const std::string& where, ModelSpec& model);

/// Reads one model; `model` comes with the defaults and its name. Relative paths are taken from `folder`.
void read_model(Fields& fields, const std::string& where, const std::filesystem::path& folder, FileCheck check,
                ModelSpec& model);

}  // namespace bulkhead::config

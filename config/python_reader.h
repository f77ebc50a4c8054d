#pragma once

#include "config/model_reader.h"

namespace bulkhead::config {

/// Reads `engine`, `interpreter` and `options`, which runtime python alone has, and refuses what it has not: a model's
/// file, its methods and its state are the engine's.
void read_python(Fields& fields, const std::string& where, const std::filesystem::path& folder, FileCheck check,
                 ModelSpec& model);

}  // namespace bulkhead::config

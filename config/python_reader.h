#pragma once

#include "config/model_reader.h"

namespace bulkhead::config {

/// Reads `engine`, `interpreter` and `options`, which only runtime python has. Refuses keys that
/// the engine itself decides: the model's file, methods and state.
void read_python(Fields& fields, const std::string& where, const std::filesystem::path& folder, FileCheck check,
                 ModelSpec& model);

}  // namespace bulkhead::config

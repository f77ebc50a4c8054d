#pragma once

#include <memory>

#include "worker/model/model.h"

namespace bulkhead::worker::generation {

/// Loads the package in the folder `spec.file`: manifest, weights, compiled functions, warm-up, and
/// on a GPU the captured steps. Sets the model's `generator()`; `methods()` are the package's
/// further methods.
/// Errors  config_invalid, package_incompatible, load_failed, capture_failed, out_of_memory (names
///         what would fit)
[[nodiscard]] Result<std::unique_ptr<Model>> load_generator(const config::ModelSpec& spec, const LoadContext& context);

}  // namespace bulkhead::worker::generation

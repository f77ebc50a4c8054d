#pragma once

#include <memory>
#include <vector>

#include "config/fleet.h"
#include "ipc/base/error.h"
#include "worker/file/model_file.h"
#include "worker/torch/runtime.h"

namespace bulkhead::worker {

/// Loads a TorchScript file onto `device` and checks the declared methods against their schemas.
/// Completes `methods` from the schemas: undeclared parameters with their types and defaults.
///
/// Errors  load_failed for a broken file, config_invalid if declaration and file
///         disagree (names both)
[[nodiscard]] Result<std::unique_ptr<Runtime>> load_torchscript(const ModelFile& file, const config::ModelSpec& spec,
                                                                c10::Device device,
                                                                std::vector<config::MethodSpec>& methods,
                                                                const std::function<void(std::uint64_t)>& progress);

}  // namespace bulkhead::worker

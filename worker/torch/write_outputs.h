#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

#include "config/fleet.h"
#include "ipc/base/error.h"
#include "worker/model/model.h"

namespace bulkhead::worker {

/// Checks results against the declared outputs: number, dtypes and shapes.
/// Errors  `code`, naming both
[[nodiscard]] Result<> check_outputs(const config::MethodSpec& method, const std::vector<at::Tensor>& outputs,
                                     ErrorCode code);

/// Checks results and writes each once into the sink, contiguous whatever its strides.
/// Errors  inference_failed for undeclared results, those of the sink
[[nodiscard]] Result<> write_outputs(const config::MethodSpec& method, const std::vector<at::Tensor>& outputs,
                                     OutputSink& sink);

}  // namespace bulkhead::worker

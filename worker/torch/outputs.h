#pragma once

/// A call's outputs: those that it returns, and those that it takes as arguments.

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

#include "config/fleet.h"
#include "ipc/base/error.h"
#include "ipc/channel/tensor_layout.h"
#include "worker/model/model.h"

namespace bulkhead::worker {

/// Returns the shape of an output that the method takes as an argument. Its dims are numbers,
/// or names of input dims, which the configuration has checked. `dims_of_input(i)` returns the
/// i-th input's dims.
[[nodiscard]] Dims dims_of_out(const config::MethodSpec& method, const config::TensorSpec& output,
                               const auto& dims_of_input) {
    const auto named = [&](const config::DimRange& dim) -> std::int64_t {
        for (std::size_t i = 0; i < method.inputs.size(); ++i)
            for (std::size_t d = 0; d < method.inputs[i].shape.size(); ++d)
                if (method.inputs[i].shape[d].name == dim.name) return dims_of_input(i)[d];
        return dim.min;
    };
    Dims dims;
    for (const config::DimRange& dim : output.shape) dims.push_back(dim.min == dim.max ? dim.min : named(dim));
    return dims;
}

/// Returns all tensor arguments of a call: the inputs, then the outputs that the method writes.
/// Allocates outputs that the caller did not bring, on the inputs' device.
[[nodiscard]] std::vector<at::Tensor> with_outs(const config::MethodSpec& method,
                                                const std::vector<at::Tensor>& inputs);

/// Returns what such a call has written: the last arguments.
[[nodiscard]] std::vector<at::Tensor> outs_of(const config::MethodSpec& method,
                                              const std::vector<at::Tensor>& arguments);

/// Checks results against the declared outputs: number, dtypes and shapes.
/// Errors  `code`, naming both
[[nodiscard]] Result<> check_outputs(const config::MethodSpec& method, const std::vector<at::Tensor>& outputs,
                                     ErrorCode code);

/// Checks results and writes each once into the sink, contiguous whatever its strides.
/// Errors  inference_failed for undeclared results, those of the sink
[[nodiscard]] Result<> write_outputs(const config::MethodSpec& method, const std::vector<at::Tensor>& outputs,
                                     OutputSink& sink);

}  // namespace bulkhead::worker

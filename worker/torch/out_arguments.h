#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include <ATen/core/Tensor.h>

#include "config/fleet.h"
#include "ipc/channel/tensor_layout.h"

namespace bulkhead::worker {

/// The shape of an output that the method takes as an argument: its dimensions are numbers or, by name, those of the
/// inputs, which the configuration has checked. `dims_of_input(i)` tells the i-th input's.
template <typename DimsOfInput>
[[nodiscard]] Dims dims_of_out(const config::MethodSpec& method, const config::TensorSpec& output,
                               const DimsOfInput& dims_of_input) {
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

/// All tensor arguments of one call: the inputs, and behind them the outputs that the method writes. Where the caller
/// has not brought room for those, there is new room for them on the inputs' device.
[[nodiscard]] std::vector<at::Tensor> with_outs(const config::MethodSpec& method,
                                                const std::vector<at::Tensor>& inputs);

/// What such a call has written: the last arguments.
[[nodiscard]] std::vector<at::Tensor> outs_of(const config::MethodSpec& method,
                                              const std::vector<at::Tensor>& arguments);

}  // namespace bulkhead::worker

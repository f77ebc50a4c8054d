#include "worker/torch/out_arguments.h"

#include <ATen/Functions.h>

#include "worker/torch/runtime.h"

namespace bulkhead::worker {

std::vector<at::Tensor> with_outs(const config::MethodSpec& method, const std::vector<at::Tensor>& inputs) {
    std::vector<at::Tensor> arguments = inputs;
    if (!method.takes_outputs() || inputs.size() > method.inputs.size()) return arguments;
    const at::Device device = inputs.empty() ? at::Device{at::kCPU} : inputs.front().device();
    for (const config::TensorSpec& output : method.outputs) {
        const Dims dims = dims_of_out(method, output, [&](std::size_t i) { return inputs[i].sizes(); });
        arguments.push_back(at::empty(at::IntArrayRef{dims.data(), dims.size()},
                                      at::TensorOptions{}.dtype(scalar_type(output.dtype)).device(device)));
    }
    return arguments;
}

std::vector<at::Tensor> outs_of(const config::MethodSpec& method, const std::vector<at::Tensor>& arguments) {
    return {arguments.end() - static_cast<std::ptrdiff_t>(method.outputs.size()), arguments.end()};
}

}  // namespace bulkhead::worker

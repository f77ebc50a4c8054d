#include "worker/torch/outputs.h"

#include <ATen/ops/empty.h>
#include <fmt/format.h>

#include "ipc/channel/dtype.h"
#include "worker/model/describe.h"
#include "worker/torch/runtime.h"

namespace bulkhead::worker {
namespace {

std::span<const std::int64_t> dims_of(const at::Tensor& tensor) {
    return {tensor.sizes().data(), tensor.sizes().size()};
}

Result<> check_output(const config::MethodSpec& method, const config::TensorSpec& spec, const at::Tensor& output,
                      ErrorCode code) {
    const auto wrong = [&](std::string what, std::string remedy) {
        return Error{code, fmt::format("output \"{}\" of {}: {}", spec.name, method.name, std::move(what)),
                     std::move(remedy)};
    };
    if (!output.defined()) return wrong("the model returned no tensor", "");
    const auto dtype = dtype_of(output.scalar_type());
    if (!dtype)
        return wrong(fmt::format("it is {}, which the channel cannot carry", c10::toString(output.scalar_type())),
                     "let the model convert it");
    if (*dtype != spec.dtype)
        return wrong(fmt::format("the model returned {}, declared is {}", to_string(*dtype), to_string(spec.dtype)),
                     fmt::format("declare {}", to_string(*dtype)));
    const auto dims = dims_of(output);
    if (!in_ranges(dims, spec.shape))
        return wrong(fmt::format("the model returned shape {}, declared is {}", describe(dims), describe(spec.shape)),
                     "declare the shapes that the model returns");
    return {};
}

}  // namespace

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

Result<> check_outputs(const config::MethodSpec& method, const std::vector<at::Tensor>& outputs, ErrorCode code) {
    if (outputs.size() != method.outputs.size())
        return Error{code,
                     fmt::format("{} returned {} tensors, {} outputs are declared", method.name, outputs.size(),
                                 method.outputs.size()),
                     "declare one output for each tensor, in their order"};
    for (std::size_t i = 0; i < outputs.size(); ++i)
        if (auto checked = check_output(method, method.outputs[i], outputs[i], code); !checked) return checked.error();
    return {};
}

Result<> write_outputs(const config::MethodSpec& method, const std::vector<at::Tensor>& outputs, OutputSink& sink) {
    if (auto checked = check_outputs(method, outputs, ErrorCode::inference_failed); !checked) return checked.error();
    for (std::size_t i = 0; i < outputs.size(); ++i) {
        const auto& spec = method.outputs[i];
        auto room = sink.allocate(spec.name, spec.dtype, dims_of(outputs[i]));
        if (!room) return room.error();
        as_tensor({spec.name, spec.dtype, dims_of(outputs[i]), room.value()}).copy_(outputs[i]);
    }
    return {};
}

}  // namespace bulkhead::worker

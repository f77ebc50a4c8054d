#include "worker/model/method_description.h"

#include "config/fleet.h"
#include "config/scalars.h"
#include "ipc/channel/dtype.h"

namespace bulkhead::worker {
namespace {

boost::json::array describe_tensors(const std::vector<config::TensorSpec>& tensors) {
    boost::json::array list;
    for (const config::TensorSpec& tensor : tensors) {
        boost::json::array shape;
        for (const config::DimRange& dim : tensor.shape) {
            if (dim.min == dim.max && dim.name.empty())
                shape.emplace_back(dim.min);
            else
                shape.emplace_back(config::dim_text(dim));
        }
        list.push_back({{"name", tensor.name}, {"dtype", to_string(tensor.dtype)}, {"shape", std::move(shape)}});
    }
    return list;
}

boost::json::array describe_parameters(const std::vector<config::ParameterSpec>& parameters) {
    boost::json::array list;
    for (const config::ParameterSpec& parameter : parameters) {
        boost::json::object entry{{"name", parameter.name},
                                  {"type", config::word_of(parameter.type)}};
        if (parameter.default_value)
            std::visit([&](const auto& value) { entry["default"] = value; }, *parameter.default_value);
        list.push_back(std::move(entry));
    }
    return list;
}

}  // namespace

boost::json::object describe_methods(std::span<const config::MethodSpec> methods) {
    boost::json::object description;
    for (const config::MethodSpec& method : methods)
        description[method.name] = {{"inputs", describe_tensors(method.inputs)},
                                    {"parameters", describe_parameters(method.parameters)},
                                    {"outputs", describe_tensors(method.outputs)}};
    return description;
}

}  // namespace bulkhead::worker

#include "worker/model/describe.h"

#include <algorithm>

#include <fmt/format.h>
#include <fmt/ranges.h>

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
        boost::json::object entry{{"name", parameter.name}, {"type", config::word_of(parameter.type)}};
        if (parameter.default_value)
            std::visit([&](const auto& value) { entry["default"] = value; }, *parameter.default_value);
        list.push_back(std::move(entry));
    }
    return list;
}

}  // namespace

std::string describe(std::span<const std::int64_t> dims) { return fmt::format("[{}]", fmt::join(dims, ", ")); }

std::string describe(const std::vector<config::DimRange>& shape) {
    std::vector<std::string> dims;
    for (const auto& range : shape) dims.push_back(config::dim_text(range));
    return fmt::format("[{}]", fmt::join(dims, ", "));
}

std::string with_article(config::ParameterType type) {
    return fmt::format("{} {}", type == config::ParameterType::integer ? "an" : "a", config::word_of(type));
}

std::string_view trimmed(std::string_view text) {
    const auto first = text.find_first_not_of(" \t\r\n\v\f");
    if (first == std::string_view::npos) return {};
    return text.substr(first, text.find_last_not_of(" \t\r\n\v\f") - first + 1);
}

bool in_ranges(std::span<const std::int64_t> dims, const std::vector<config::DimRange>& shape) {
    return std::ranges::equal(dims, shape, [](std::int64_t dim, const config::DimRange& range) {
        return range.min <= dim && dim <= range.max;
    });
}

std::string shortened(std::string_view text) {
    constexpr std::size_t length_max = 60;
    return text.size() <= length_max ? std::string{text} : std::string{text.substr(0, length_max)} + "…";
}

boost::json::object describe_methods(std::span<const config::MethodSpec> methods) {
    boost::json::object description;
    for (const config::MethodSpec& method : methods)
        description[method.name] = {{"inputs", describe_tensors(method.inputs)},
                                    {"parameters", describe_parameters(method.parameters)},
                                    {"outputs", describe_tensors(method.outputs)}};
    return description;
}

}  // namespace bulkhead::worker

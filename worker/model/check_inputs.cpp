#include <algorithm>
#include <cmath>
#include <map>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "ipc/base/json_codec.h"
#include "ipc/channel/dtype.h"
#include "ipc/channel/tensor_layout.h"
#include "worker/model/describe.h"
#include "worker/model/model.h"

namespace bulkhead::worker {
namespace {

using config::ParameterType;
using config::ParameterValue;

Error invalid(const config::MethodSpec& method, std::string what, std::string remedy) {
    return {ErrorCode::input_invalid, fmt::format("calling {}: {}", method.name, std::move(what)), std::move(remedy)};
}

std::string names_of(const auto& specs) {
    std::vector<std::string_view> names;
    for (const auto& spec : specs) names.push_back(spec.name);
    return names.empty() ? "none" : fmt::format("{}", fmt::join(names, ", "));
}

Result<> check_tensor(const config::MethodSpec& method, const config::TensorSpec& spec, const TensorView& view) {
    const auto during = [&] { return fmt::format("calling {}: input \"{}\"", method.name, spec.name); };
    if (view.dtype != spec.dtype)
        return Error{ErrorCode::dtype_unsupported,
                     fmt::format("{} is {}, declared is {}", during(), to_string(view.dtype), to_string(spec.dtype)),
                     fmt::format("send {}", to_string(spec.dtype))};
    if (view.dims.size() != spec.shape.size())
        return Error{ErrorCode::shape_mismatch,
                     fmt::format("{} has rank {} ({}), declared is rank {} ({})", during(), view.dims.size(),
                                 describe(view.dims), spec.shape.size(), describe(spec.shape)),
                     "reshape it"};
    if (!in_ranges(view.dims, spec.shape))
        return Error{
            ErrorCode::shape_mismatch,
            fmt::format("{} has shape {}, declared is {}", during(), describe(view.dims), describe(spec.shape)),
            "send a shape within the declared ranges, or widen them where the model allows it"};
    const Result<std::uint64_t> bytes = tensor_bytes(view.dtype, view.dims);
    if (!bytes) return Error{bytes.error()}.during(during());
    if (*bytes != view.bytes.size())
        return Error{ErrorCode::shape_mismatch,
                     fmt::format("{} of {} {} takes {} bytes, {} came", during(), to_string(view.dtype),
                                 describe(view.dims), *bytes, view.bytes.size()),
                     "send exactly the tensor's bytes, contiguous"};
    return {};
}

/// Checks that dims of one name have one size. `ordered` are the inputs in the method's order.
Result<> check_named_dims(const config::MethodSpec& method, std::span<const TensorView> ordered) {
    /// Input and size, by name.
    std::map<std::string_view, std::pair<std::string_view, std::int64_t>> firsts;
    for (std::size_t i = 0; i < ordered.size(); ++i) {
        const auto& spec = method.inputs[i];
        for (std::size_t d = 0; d < spec.shape.size(); ++d) {
            const auto& name = spec.shape[d].name;
            if (name.empty()) continue;
            const auto size = ordered[i].dims[d];
            const auto& [input, first] = firsts.try_emplace(name, spec.name, size).first->second;
            if (first != size)
                return Error{ErrorCode::shape_mismatch,
                             fmt::format("calling {}: inputs \"{}\" and \"{}\" share the dimension {}: {} and {} came",
                                         method.name, input, spec.name, name, first, size),
                             fmt::format("send them with one size of {}, padded where one is shorter", name)};
        }
    }
    return {};
}

/// JSON has numbers beyond 64 bits: 1e999 is read as infinity.
bool is_beyond(const boost::json::value& value) { return value.is_double() && !std::isfinite(value.get_double()); }

std::string_view kind_name(const boost::json::value& value) {
    switch (value.kind()) {
    case boost::json::kind::null: return "null";
    case boost::json::kind::bool_: return "a boolean";
    case boost::json::kind::int64: return "an integer";
    case boost::json::kind::uint64: return "an integer beyond 64 bits";
    case boost::json::kind::double_: return is_beyond(value) ? "a number beyond 64 bits" : "a number";
    case boost::json::kind::string: return "a string";
    case boost::json::kind::array: return "an array";
    case boost::json::kind::object: return "an object";
    }
    return "unknown";
}

template <typename T>
std::optional<ParameterValue> read_as(const boost::json::value& value) {
    T read{};
    return json_codec::decode(value, read) ? std::optional<ParameterValue>{std::move(read)} : std::nullopt;
}

/// Empty if the JSON value has another type, or is beyond 64 bits.
std::optional<ParameterValue> typed(ParameterType type, const boost::json::value& value) {
    if (is_beyond(value)) return std::nullopt;
    switch (type) {
    case ParameterType::integer: return value.is_double() ? std::nullopt : read_as<std::int64_t>(value);
    case ParameterType::number: return read_as<double>(value);
    case ParameterType::boolean: return read_as<bool>(value);
    case ParameterType::string: return read_as<std::string>(value);
    }
    return std::nullopt;
}

}  // namespace

Result<> check_inputs(const config::MethodSpec& method, std::span<const TensorView> inputs,
                      std::vector<TensorView>& ordered) {
    for (const auto& view : inputs)
        if (std::ranges::none_of(method.inputs, [&](const auto& spec) { return spec.name == view.name; }))
            return invalid(method, fmt::format("it takes no input \"{}\"", view.name),
                           fmt::format("its inputs: {}", names_of(method.inputs)));

    ordered.clear();
    ordered.reserve(method.inputs.size());
    for (const auto& spec : method.inputs) {
        const auto named = [&](const TensorView& view) { return view.name == spec.name; };
        const auto found = std::ranges::find_if(inputs, named);
        if (found == inputs.end())
            return invalid(method, fmt::format("input \"{}\" is missing", spec.name),
                           fmt::format("send {} {}", to_string(spec.dtype), describe(spec.shape)));
        if (std::ranges::count_if(inputs, named) > 1)
            return invalid(method, fmt::format("input \"{}\" came twice", spec.name), "send each input once");
        if (auto checked = check_tensor(method, spec, *found); !checked) return checked.error();
        ordered.push_back(*found);
    }
    return check_named_dims(method, ordered);
}

Result<> check_parameters(const config::MethodSpec& method, const boost::json::object& given,
                          std::vector<ParameterValue>& values) {
    for (const auto& member : given)
        if (std::ranges::none_of(method.parameters, [&](const auto& spec) { return spec.name == member.key(); }))
            return invalid(method, fmt::format("it takes no parameter \"{}\"", std::string_view{member.key()}),
                           fmt::format("its parameters: {}", names_of(method.parameters)));

    values.resize(method.parameters.size());
    for (std::size_t i = 0; i < values.size(); ++i) {
        const auto& spec = method.parameters[i];
        const auto* const value = given.if_contains(spec.name);
        if (value == nullptr) {
            if (!spec.default_value)
                return invalid(method, fmt::format("parameter \"{}\" is missing", spec.name),
                               fmt::format("give it, {}, or declare a default", with_article(spec.type)));
            values[i] = *spec.default_value;
            continue;
        }
        auto converted = typed(spec.type, *value);
        if (!converted)
            return invalid(method,
                           fmt::format("parameter \"{}\" is {} ({}), declared is {}", spec.name, kind_name(*value),
                                       shortened(boost::json::serialize(*value)), with_article(spec.type)),
                           fmt::format("give {}", with_article(spec.type)));
        values[i] = std::move(*converted);
    }
    return {};
}

}  // namespace bulkhead::worker

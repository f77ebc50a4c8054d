#include "worker/torch/torchscript_schema.h"

#include <algorithm>
#include <optional>

#include <ATen/core/jit_type.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "worker/model/describe.h"

namespace bulkhead::worker {
namespace {

using config::ParameterType;

/// The type itself, or an Optional's element type.
c10::TypePtr value_type(const c10::TypePtr& type) {
    if (const auto optional = type->cast<c10::OptionalType>()) return optional->getElementType();
    return type;
}

bool is_tensor(const c10::TypePtr& type) { return value_type(type)->kind() == c10::TypeKind::TensorType; }

/// Empty for a type that no parameter can have, such as a list.
std::optional<ParameterType> parameter_type(const c10::TypePtr& type) {
    switch (value_type(type)->kind()) {
    case c10::TypeKind::IntType: return ParameterType::integer;
    case c10::TypeKind::FloatType:
    case c10::TypeKind::NumberType: return ParameterType::number;
    case c10::TypeKind::BoolType: return ParameterType::boolean;
    case c10::TypeKind::StringType: return ParameterType::string;
    default: return std::nullopt;
    }
}

std::optional<config::ParameterValue> parameter_default(const std::optional<c10::IValue>& value) {
    if (!value) return std::nullopt;
    if (value->isInt()) return value->toInt();
    if (value->isDouble()) return value->toDouble();
    if (value->isBool()) return value->toBool();
    if (value->isString()) return value->toStringRef();
    return std::nullopt;
}

std::optional<std::size_t> index_of(const auto& specs, const std::string& name) {
    const auto found = std::ranges::find_if(specs, [&](const auto& spec) { return spec.name == name; });
    if (found == specs.end()) return std::nullopt;
    return static_cast<std::size_t>(found - specs.begin());
}

/// Matches one schema argument with the declaration. Does not throw.
class Matcher {
public:
    Matcher(const c10::FunctionSchema& schema, config::MethodSpec& method) : schema_{schema}, method_{method} {}

    Result<ArgumentSource> match(const c10::Argument& argument) {
        const auto input = index_of(method_.inputs, argument.name());
        const auto parameter = index_of(method_.parameters, argument.name());
        if (is_tensor(argument.type())) {
            if (parameter) return disagree(argument, "is declared as a parameter", "declare it under `inputs`");
            if (input) return ArgumentSource{InputArgument{*input}};
            if (const auto out = index_of(method_.outputs, argument.name()); out && method_.takes_outputs())
                return ArgumentSource{InputArgument{method_.inputs.size() + *out}};
            if (argument.default_value()) return ArgumentSource{*argument.default_value()};
            return disagree(argument, "is not declared",
                            fmt::format("declare its dtype and shape: inputs: [{{name: {}, dtype: float32, shape: "
                                        "[1, 1..256]}}]",
                                        argument.name()));
        }
        const auto type = parameter_type(argument.type());
        if (input)
            return disagree(argument, "is declared as an input tensor",
                            type ? fmt::format("declare it under `parameters`, as {}", with_article(*type)) : "");
        if (parameter) return match_parameter(argument, type, *parameter);
        if (type && (!argument.default_value() || parameter_default(argument.default_value()))) {
            method_.parameters.push_back({argument.name(), *type, parameter_default(argument.default_value())});
            return ArgumentSource{ParameterArgument{method_.parameters.size() - 1}};
        }
        if (argument.default_value()) return ArgumentSource{*argument.default_value()};
        return disagree(argument, "is of a type that requests cannot carry",
                        "wrap the model in a method that takes tensors, numbers, booleans and strings");
    }

    [[nodiscard]] Error unknown(const char* what, const std::string& name) const {
        return {ErrorCode::config_invalid,
                fmt::format("checking method {}: it is declared with {} \"{}\", the file's takes {}", method_.name,
                            what, name, describe(schema_)),
                "declare the names that the file has"};
    }

private:
    Result<ArgumentSource> match_parameter(const c10::Argument& argument, std::optional<ParameterType> type,
                                           std::size_t index) const {
        const auto declared = method_.parameters[index].type;
        const bool any_number =
            value_type(argument.type())->kind() == c10::TypeKind::NumberType && declared == ParameterType::integer;
        if (!type)
            return disagree(argument, fmt::format("is declared as {}", with_article(declared)),
                            "leave it to its default, or wrap the model in a method without it");
        if (declared != *type && !any_number)
            return disagree(argument, fmt::format("is declared as {}", with_article(declared)),
                            fmt::format("declare it as {}", with_article(*type)));
        return ArgumentSource{ParameterArgument{index}};
    }

    [[nodiscard]] Error disagree(const c10::Argument& argument, std::string_view what, std::string remedy) const {
        return {ErrorCode::config_invalid,
                fmt::format("checking method {}: argument \"{}\" ({} in the file) {}; the file's method takes {}",
                            method_.name, argument.name(), argument.type()->annotation_str(), what, describe(schema_)),
                std::move(remedy)};
    }

    const c10::FunctionSchema& schema_;
    config::MethodSpec& method_;
};

}  // namespace

Result<std::vector<ArgumentSource>> match_arguments(const c10::FunctionSchema& schema, config::MethodSpec& method) {
    Matcher matcher{schema, method};
    const auto& arguments = schema.arguments();
    const auto takes = [&](const std::string& name) {
        return std::ranges::any_of(arguments.begin() + 1, arguments.end(),
                                   [&](const auto& argument) { return argument.name() == name; });
    };
    for (const auto& input : method.inputs)
        if (!takes(input.name)) return matcher.unknown("input", input.name);
    for (const auto& parameter : method.parameters)
        if (!takes(parameter.name)) return matcher.unknown("parameter", parameter.name);
    if (method.takes_outputs())
        for (const auto& output : method.outputs)
            if (!takes(output.name)) return matcher.unknown("`out` output", output.name);

    std::vector<ArgumentSource> sources;
    for (auto argument = arguments.begin() + 1; argument != arguments.end(); ++argument) {
        auto source = matcher.match(*argument);
        if (!source) return source.error();
        sources.push_back(std::move(source.value()));
    }
    return sources;
}

std::string describe(const c10::FunctionSchema& schema) {
    std::vector<std::string> arguments;
    for (auto argument = schema.arguments().begin() + 1; argument < schema.arguments().end(); ++argument) {
        const auto value = parameter_default(argument->default_value());
        const auto spelled = [](const auto& held) { return fmt::format("={}", held); };
        arguments.push_back(fmt::format("{} {}{}", argument->type()->annotation_str(), argument->name(),
                                        value ? std::visit(spelled, *value) : std::string{}));
    }
    std::vector<std::string> results;
    for (const auto& result : schema.returns()) results.push_back(result.type()->annotation_str());
    return fmt::format("({}) -> {}", fmt::join(arguments, ", "), fmt::join(results, ", "));
}

}  // namespace bulkhead::worker

#include "clients/cli/tensors/inputs.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "clients/cli/tensors/json_tensor.h"
#include "clients/cli/text/json_access.h"
#include "config/scalars.h"
#include "ipc/channel/dtype.h"

namespace bulkhead::cli {
namespace {

std::string step(std::string_view name) { return fmt::format("input \"{}\"", name); }

Result<Source> open_source(Assignment input) {
    if (input.value.starts_with('@')) {
        Result<NpyFile> file = NpyFile::open(input.value.substr(1));
        if (!file) return std::move(file).error();
        return Source{std::move(input.name), std::move(*file)};
    }
    boost::system::error_code failure;
    json::value value = json::parse(input.value, failure);
    if (failure)
        return Error{ErrorCode::input_invalid, fmt::format("not JSON: {}", failure.message()),
                     "write nested lists of numbers such as [[1, 2]], or @FILE.npy"};
    return Source{std::move(input.name), std::move(value)};
}

/// Finds the entry of that name in a method's inputs, parameters or outputs.
const json::value* find_named(const json::value& method, std::string_view kind, std::string_view name) {
    for (const json::value& entry : array_member(method, kind))
        if (text_member(entry, "name") == name) return &entry;
    return nullptr;
}

std::string names_in(const json::value& method, std::string_view kind) {
    std::vector<std::string> names;
    for (const json::value& entry : array_member(method, kind)) names.push_back(text_member(entry, "name"));
    return names.empty() ? "none is described" : fmt::format("there are: {}", fmt::join(names, ", "));
}

/// Leases room for one input and fills it.
Result<Input> fill_input(Channel& channel, const json::value& method, const Source& source) {
    if (const auto* file = std::get_if<NpyFile>(&source.data)) {
        Result<Input> input = channel.allocate(file->dtype(), file->dims());
        if (!input) return input;
        if (const Result<> read = file->read(input->bytes()); !read) return read.error();
        return input;
    }
    const json::value& data = std::get<json::value>(source.data);
    const json::value* described = find_named(method, "inputs", source.name);
    const auto dtype = described != nullptr ? dtype_from(text_member(*described, "dtype")) : std::nullopt;
    if (!dtype)
        return Error{ErrorCode::input_invalid, "the model describes no such input",
                     names_in(method, "inputs") + "; an input that is not described is given as @FILE.npy"};
    const auto dims = dims_of(data);
    if (!dims) return dims.error();
    Result<Input> input = channel.allocate(*dtype, *dims);
    if (!input) return input;
    if (const Result<> filled = fill(data, *dtype, input->bytes()); !filled) return filled.error();
    return input;
}

}  // namespace

void take_assignments(CLI::Option* option, const char* type) {
    option->type_name(type)->allow_extra_args(false);  // one value each: the next word may be NAME
    option->check([type](const std::string& text) {
        const bool is_named = text.find('=', 1) != std::string::npos;
        return is_named ? std::string{} : fmt::format("\"{}\": write {}", text, type);
    });
}

void take_duration(CLI::Option* option) {
    option->type_name("DURATION")->check([](const std::string& text) {
        return config::parse_duration(text) ? "" : "write a whole number and a unit: 500ms, 30s, 2m";
    });
}

Assignment split(const std::string& text) {
    const std::size_t equals = text.find('=', 1);
    return {text.substr(0, equals), text.substr(equals + 1)};
}

Result<std::vector<Source>> open_sources(const std::vector<std::string>& texts) {
    std::vector<Source> sources;
    for (const std::string& text : texts) {
        Result<Source> source = open_source(split(text));
        if (!source) return std::move(source).error().during(step(split(text).name));
        sources.push_back(std::move(*source));
    }
    return sources;
}

Result<const json::value*> find_method(const Channel& channel, const std::string& name) {
    if (const json::value* method = channel.methods().if_contains(name)) return method;
    std::vector<std::string_view> names;
    for (const auto& member : channel.methods()) names.push_back(member.key());
    return Error{ErrorCode::method_unknown, fmt::format("method \"{}\" of {}", name, channel.model()),
                 fmt::format("its methods: {}", fmt::join(names, ", "))};
}

Result<Inputs> fill_inputs(Channel& channel, const json::value& method, const std::vector<Source>& sources) {
    Inputs inputs;
    inputs.leased.reserve(sources.size());  // `named` points into it
    for (const Source& source : sources) {
        Result<Input> input = fill_input(channel, method, source);
        if (!input) return std::move(input).error().during(step(source.name));
        inputs.leased.push_back(std::move(*input));
        inputs.named.emplace_back(source.name, &inputs.leased.back());
    }
    return inputs;
}

Result<json::object> parse_parameters(const std::vector<std::string>& texts, const json::value& method) {
    json::object parameters;
    for (const std::string& text : texts) {
        const Assignment given = split(text);
        const json::value* described = find_named(method, "parameters", given.name);
        boost::system::error_code failure;
        json::value value = json::parse(given.value, failure);
        const bool wants_text = described != nullptr && text_member(*described, "type") == "string";
        if (failure || (wants_text && !value.is_string())) value = given.value;
        if (!parameters.emplace(given.name, std::move(value)).second)
            return Error{ErrorCode::input_invalid, fmt::format("--param {} twice", given.name),
                         "give each parameter once"};
    }
    return parameters;
}

}  // namespace bulkhead::cli

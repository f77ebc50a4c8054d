#include "config/model_reader.h"

#include <algorithm>

#include "config/limits.h"
#include "ipc/channel/dtype.h"

namespace bulkhead::config {
namespace {

std::optional<wire::DType> read_dtype(const Value& value) {
    const auto dtype = value.node().kind == Node::Kind::scalar ? dtype_from(value.node().text) : std::nullopt;
    if (!dtype) {
        std::vector<std::string_view> names;
        for (const DTypeFacts& one : dtype_facts) names.push_back(one.name);
        value.refuse(suggestion(value.node().text, names));
    }
    return dtype;
}

void check_name(const Fields::Member& member) {
    if (!is_tensor_name(member.key))
        member.value.report().add(member.location, fmt::format("{}: not a usable name", in_quotes(member.key)),
                                  "a name has 1 to 55 printable ASCII characters");
}

bool check_count(const Value& map, std::size_t max) {
    if (map.node().entries.size() <= max) return true;
    map.refuse(fmt::format("{} has {} members", map.what(), map.node().entries.size()), fmt::format("at most {}", max));
    return false;
}

std::vector<TensorSpec> read_tensors(const Value& map, bool are_outputs) {
    std::vector<TensorSpec> tensors;
    Fields fields{map, map.what() + "."};
    if (!check_count(map, wire::tensors_max)) return tensors;
    for (const Fields::Member& member : fields.members()) {
        check_name(member);
        TensorSpec tensor{member.key, {}, {}};
        Fields keys{member.value, member.value.what() + ": "};
        if (const auto dtype = keys.require(key::dtype, "add dtype, such as float32"))
            tensor.dtype = read_dtype(*dtype).value_or(wire::DType{});
        if (const auto shape = keys.require(key::shape, "add shape, such as [1, 1..256]; [] for a scalar"))
            tensor.shape = shape->shape().value_or(std::vector<DimRange>{});
        if (const auto out = are_outputs ? keys.take(key::out) : std::nullopt)
            tensor.out = out->boolean().value_or(false);
        keys.finish();
        tensors.push_back(std::move(tensor));
    }
    return tensors;
}

/// Checks that dimensions of one name have one range.
void check_dim_names(const Value& map, const std::vector<TensorSpec>& inputs) {
    if (inputs.empty()) return;
    std::map<std::string_view, std::pair<DimRange, std::string>> firsts;
    const auto members = Fields{map, map.what() + "."}.members();
    for (std::size_t i = 0; i < inputs.size(); ++i) {
        const std::vector<DimRange>& shape = inputs[i].shape;
        if (shape.empty()) continue;
        const Value& tensor = members[i].value;
        const auto dims = Fields{tensor, tensor.what() + ": "}.take(key::shape)->items(wire::rank_max);
        for (std::size_t d = 0; d < shape.size(); ++d) {
            if (shape[d].name.empty()) continue;
            const auto place = fmt::format("shape[{}] of \"{}\"", d, inputs[i].name);
            const auto& [range, where] = firsts.try_emplace(shape[d].name, shape[d], place).first->second;
            if (range != shape[d])
                dims[d].refuse(
                    fmt::format("{} = {}, but {} = {}", dims[d].what(), dim_text(shape[d]), where, dim_text(range)),
                    "dimensions of one name are of one size: give them one range, or different names");
        }
    }
}

/// An output that the caller allocates needs its size before the method runs: each of its
/// dimensions must be a number or the name of an input's dimension.
void check_out(const Value& map, const MethodSpec& method) {
    if (method.outputs.empty()) return;
    const auto members = Fields{map, map.what() + "."}.members();
    const auto is_an_inputs = [&](const std::string& name) {
        return !name.empty() && std::ranges::any_of(method.inputs, [&](const TensorSpec& input) {
            return std::ranges::find(input.shape, name, &DimRange::name) != input.shape.end();
        });
    };
    for (std::size_t i = 0; i < method.outputs.size(); ++i) {
        const TensorSpec& output = method.outputs[i];
        if (output.out != method.takes_outputs())
            return members[i].value.refuse(fmt::format("{} {} an argument of the method, the output before it {}",
                                                       members[i].value.what(), output.out ? "is" : "is not",
                                                       output.out ? "is not" : "is"),
                                           "give `out: true` to all outputs of a method, or to none");
        if (!output.out) continue;
        for (std::size_t d = 0; d < output.shape.size(); ++d)
            if (const DimRange& dim = output.shape[d]; dim.min != dim.max && !is_an_inputs(dim.name))
                return members[i].value.refuse(
                    fmt::format("{}: shape[{}] = {} is known only once the method has run", members[i].value.what(), d,
                                dim_text(dim)),
                    "write a number, or a name that a dimension of an input has, such as n=1..256");
    }
}

/// Checks that dimensions of one name have the same size in all input shapes.
bool check_named_sizes(const Value& value, const MethodSpec& method,
                       const std::vector<std::vector<std::int64_t>>& shapes, std::string remedy) {
    std::map<std::string_view, std::pair<std::int64_t, std::string_view>> firsts;
    for (std::size_t i = 0; i < shapes.size(); ++i) {
        const TensorSpec& input = method.inputs[i];
        for (std::size_t d = 0; d < input.shape.size(); ++d) {
            const std::string& name = input.shape[d].name;
            if (name.empty()) continue;
            const auto& [size, first] = firsts.try_emplace(name, shapes[i][d], input.name).first->second;
            if (size == shapes[i][d]) continue;
            value.refuse(fmt::format("{}: the dimension {} is {} in \"{}\" and {} in \"{}\"", value.what(), name, size,
                                     first, shapes[i][d], input.name),
                         std::move(remedy));
            return false;
        }
    }
    return true;
}

std::vector<std::vector<std::int64_t>> warmup_shapes(const MethodSpec& method) {
    std::vector<std::vector<std::int64_t>> shapes;
    for (const TensorSpec& input : method.inputs) {
        std::vector<std::int64_t>& dims = shapes.emplace_back();
        for (const DimRange& range : input.shape) dims.push_back(range.min);
        if (const auto declared = method.warmup.find(input.name); declared != method.warmup.end())
            dims = declared->second;
    }
    return shapes;
}

std::optional<ParameterValue> read_default(const Value& value, ParameterType type) {
    switch (type) {
    case ParameterType::integer:
        return value.integer(std::numeric_limits<std::int64_t>::min(), std::numeric_limits<std::int64_t>::max());
    case ParameterType::number: return value.number();
    case ParameterType::boolean: return value.boolean();
    case ParameterType::string: return value.text();
    }
    return std::nullopt;
}

std::vector<ParameterSpec> read_parameters(const Value& map) {
    std::vector<ParameterSpec> parameters;
    Fields fields{map, map.what() + "."};
    if (!check_count(map, limits::parameters_max)) return parameters;
    for (const Fields::Member& member : fields.members()) {
        check_name(member);
        ParameterSpec parameter{member.key, {}, {}};
        Fields keys{member.value, member.value.what() + ": "};
        const auto type = keys.require(key::type, "add type: integer, number, boolean or string");
        const bool is_typed = type && type->word(parameter.type);
        const auto default_value = keys.take(key::default_);
        if (default_value && is_typed) parameter.default_value = read_default(*default_value, parameter.type);
        keys.finish();
        parameters.push_back(std::move(parameter));
    }
    return parameters;
}

/// Finds the declared input that a bucket, padding or warm-up names.
const TensorSpec* find_input(const MethodSpec& method, const Fields::Member& member) {
    std::vector<std::string_view> names;
    for (const TensorSpec& input : method.inputs) {
        if (input.name == member.key) return &input;
        names.push_back(input.name);
    }
    member.value.report().add(member.location, fmt::format("{}: no such input", member.value.what()),
                              names.empty() ? "declare it under inputs" : suggestion(member.key, names));
    return nullptr;
}

/// Reads the fixed shape of one input, inside its declared range.
std::optional<std::vector<std::int64_t>> read_fixed_shape(const Value& value, const TensorSpec& input) {
    const auto dims = value.dims();
    if (!dims) return std::nullopt;
    if (dims->size() != input.shape.size()) {
        value.refuse(fmt::format("{} has {} dimensions", value.what(), dims->size()),
                     fmt::format("input \"{}\" is declared with {}", input.name, input.shape.size()));
        return std::nullopt;
    }
    const auto items = value.items(wire::rank_max);
    bool ok = true;
    for (std::size_t i = 0; i < dims->size(); ++i)
        if ((*dims)[i] < input.shape[i].min || (*dims)[i] > input.shape[i].max) {
            items[i].refuse(fmt::format("input \"{}\" is declared with {} here", input.name, dim_text(input.shape[i])));
            ok = false;
        }
    return ok ? dims : std::nullopt;
}

std::optional<Bucket> read_bucket(const Value& value, const MethodSpec& method) {
    Fields fields{value, value.what() + "."};
    if (!fields.is_map()) return std::nullopt;
    std::map<std::string_view, std::vector<std::int64_t>> shapes;
    bool ok = true;
    for (const Fields::Member& member : fields.members()) {
        const TensorSpec* input = find_input(method, member);
        const auto shape = input ? read_fixed_shape(member.value, *input) : std::nullopt;
        if (shape) shapes[input->name] = *shape;
        ok = ok && shape;
    }
    Bucket bucket;
    for (const TensorSpec& input : method.inputs) {
        if (!fields.has(input.name)) {
            value.refuse(fmt::format("{}: no shape for input \"{}\"", value.what(), input.name),
                         "a bucket gives the shape of every input");
            ok = false;
        }
        bucket.shapes.push_back(shapes[input.name]);
    }
    return ok ? std::optional{std::move(bucket)} : std::nullopt;
}

void read_buckets(const Value& list, MethodSpec& method) {
    for (const Value& item : list.items(limits::buckets_max)) {
        const auto bucket = read_bucket(item, method);
        if (!bucket || !check_named_sizes(item, method, bucket->shapes, "give it one size in a bucket")) continue;
        if (std::ranges::find(method.buckets, *bucket) != method.buckets.end())
            item.refuse(fmt::format("{} stands there twice", item.what()), "keep one bucket of each shape");
        else
            method.buckets.push_back(*bucket);
    }
}

}  // namespace

MethodSpec read_method(Fields& fields, std::string name) {
    MethodSpec method;
    method.name = std::move(name);
    bool inputs_are_clear = true;  // false: keys that name inputs cannot be checked
    if (const auto inputs = fields.take(key::inputs)) {
        inputs_are_clear = inputs->node().kind == Node::Kind::map;
        method.inputs = read_tensors(*inputs, false);
        check_dim_names(*inputs, method.inputs);
    }
    if (const auto parameters = fields.take(key::parameters)) method.parameters = read_parameters(*parameters);
    if (const auto outputs = fields.take(key::outputs)) {
        method.outputs = read_tensors(*outputs, true);
        check_out(*outputs, method);
    }
    if (const auto buckets = fields.take(key::buckets); buckets && inputs_are_clear) read_buckets(*buckets, method);
    if (const auto padding = fields.take(key::padding); padding && inputs_are_clear)
        for (const Fields::Member& member : Fields{*padding, padding->what() + "."}.members())
            if (const auto fill = member.value.number(); find_input(method, member) && fill)
                method.padding[member.key] = *fill;
    if (const auto warmup = fields.take(key::warmup); warmup && inputs_are_clear) {
        for (const Fields::Member& member : Fields{*warmup, warmup->what() + "."}.members())
            if (const TensorSpec* input = find_input(method, member))
                if (const auto shape = read_fixed_shape(member.value, *input)) method.warmup[member.key] = *shape;
        check_named_sizes(*warmup, method, warmup_shapes(method),
                          "give it one size: an input without a warm-up shape has the smallest it may have");
    }
    return method;
}

std::vector<MethodSpec> read_methods(const Value& methods, const std::string& where) {
    std::vector<MethodSpec> all;
    const Fields fields{methods, where};
    if (!check_count(methods, limits::methods_max)) return all;
    if (fields.is_map() && methods.node().entries.empty())
        methods.refuse(fmt::format("{} is empty", methods.what()), "name a method, such as forward, or remove the key");
    for (const Fields::Member& member : fields.members()) {
        const std::string method_where = fmt::format("{}method \"{}\": ", where, member.key);
        if (!is_method_name(member.key))
            member.value.report().add(member.location, fmt::format("{}method {}", where, in_quotes(member.key)),
                                      "a method's name has 1 to 63 of A-Z a-z 0-9 . _ - and begins with a letter or _");
        Fields keys{member.value, method_where};
        all.push_back(read_method(keys, member.key));
        keys.finish();
    }
    return all;
}

}  // namespace bulkhead::config

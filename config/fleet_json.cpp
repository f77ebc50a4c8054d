#include "config/fleet_json.h"

#include "config/model_reader.h"
#include "config/yaml_tree.h"
#include "ipc/channel/dtype.h"

namespace bulkhead::config {
namespace {

namespace json = boost::json;

std::string duration_text(std::chrono::milliseconds duration) { return fmt::format("{}ms", duration.count()); }

json::object to_json(const std::vector<TensorSpec>& tensors) {
    json::object all;
    for (const TensorSpec& tensor : tensors) {
        json::array shape;
        for (const DimRange& dim : tensor.shape)
            shape.push_back(dim.min == dim.max && dim.name.empty() ? json::value(dim.min) : json::value(dim_text(dim)));
        json::object one{{key::dtype, to_string(tensor.dtype)}, {key::shape, std::move(shape)}};
        if (tensor.out) one[key::out] = true;
        all[tensor.name] = std::move(one);
    }
    return all;
}

json::object to_json(const std::vector<ParameterSpec>& parameters) {
    json::object all;
    for (const ParameterSpec& parameter : parameters) {
        json::object& one = all[parameter.name].emplace_object();
        one[key::type] = word_of(parameter.type);
        if (parameter.default_value)
            one[key::default_] =
                std::visit([](const auto& value) { return json::value(value); }, *parameter.default_value);
    }
    return all;
}

json::object to_json(const MethodSpec& method) {
    json::array buckets;
    for (const Bucket& bucket : method.buckets) {
        json::object shapes;
        for (std::size_t i = 0; i < bucket.shapes.size(); ++i)
            shapes[method.inputs[i].name] = json::value_from(bucket.shapes[i]);
        buckets.push_back(std::move(shapes));
    }
    return {{key::inputs, to_json(method.inputs)},
            {key::parameters, to_json(method.parameters)},
            {key::outputs, to_json(method.outputs)},
            {key::buckets, std::move(buckets)},
            {key::padding, json::value_from(method.padding)},
            {key::warmup, json::value_from(method.warmup)}};
}

template <typename Struct>
json::object keys_to_json(const Struct& from);

/// The inverse of the reader; leaves out members without a value.
struct KeyWriter {
    json::object& to;

    void operator()(std::string_view /*key*/, rule::Ignored) const {}
    void operator()(std::string_view key, const std::optional<std::chrono::milliseconds>& from, rule::KeepAlive) const {
        if (from) to[key] = from->count() == 0 ? std::string{"0"} : duration_text(*from);
    }
    void operator()(std::string_view key, std::chrono::milliseconds from, rule::Duration) const {
        if (from.count() > 0) to[key] = duration_text(from);
    }
    void operator()(std::string_view key, const std::vector<std::uint32_t>& from, rule::Lengths) const {
        if (!from.empty()) to[key] = json::value_from(from);
    }
    void operator()(std::string_view key, auto from, rule::Enumeration) const { to[key] = word_of(from); }
    void operator()(std::string_view key, const auto& from, rule::Group) const { to[key] = keys_to_json(from); }
    template <typename T>
    void operator()(std::string_view key, const std::optional<T>& from, auto /*rule*/) const {
        if (from) to[key] = *from;
    }
    void operator()(std::string_view key, const auto& from, auto /*rule*/) const { to[key] = from; }

    void operator()(std::string_view key, const ModelSpec& from, rule::Device) const {
        to[key] = from.device;
        if (from.other_devices.empty()) return;
        json::array& devices = to[key].emplace_array();
        devices.emplace_back(from.device);
        for (const std::string& device : from.other_devices) devices.emplace_back(device);
    }
    void operator()(std::string_view key, const ModelSpec& from, rule::Replicas) const {
        to[key] = from.replicas;
        if (from.replicas != from.replicas_min)
            to[key] = json::object{{key::min, from.replicas_min}, {key::max, from.replicas}};
    }
    void operator()(std::string_view key, const ModelSpec& from, rule::Preload) const {
        to[key] = from.near ? json::value("near") : json::value(from.preload);
    }
    void operator()(std::string_view key, const ModelSpec& from, rule::ModelGroup) const {
        if (from.group) to[key] = json::object{{key::name, from.group->name}, {key::kind, word_of(from.group->kind)}};
    }
    void operator()(std::string_view key, const ModelSpec& from, rule::Environment) const {
        to[key] = json::value_from(from.environment);
    }
    void operator()(std::string_view key, const ModelSpec& from, rule::State) const {
        json::object& state = to[key].emplace_object();
        state[key::scope] = word_of(from.state);
        if (!from.reset_method.empty()) state[key::reset] = from.reset_method;
    }
};

template <typename Struct>
json::object keys_to_json(const Struct& from) {
    json::object to;
    Struct::keys(from, KeyWriter{to});
    return to;
}

}  // namespace

json::object to_json(const ModelSpec& model) {
    json::object all{{key::name, model.name}, {key::runtime, word_of(model.runtime)}};
    if (model.runtime == Runtime::python) {
        all[key::engine] = model.python.engine;
        if (!model.python.interpreter.empty()) all[key::interpreter] = model.python.interpreter.string();
        all[key::options] = model.python.options;
    } else {
        all[model.runtime == Runtime::torchscript ? key::file : key::package] = model.file.string();
    }
    ModelSettings::keys(model, KeyWriter{all});
    if (model.runtime == Runtime::generate) all[key::generate] = keys_to_json(model.generate);
    if (!model.methods.empty()) {
        json::object methods;
        for (const MethodSpec& method : model.methods) methods[method.name] = to_json(method);
        all[key::methods] = std::move(methods);
    }
    return all;
}

json::object worker_json(const ModelSpec& model) {
    json::object all = to_json(model);
    for (const auto& [under, key] : supervisor_keys)
        (under.empty() ? all : all.at(under).as_object()).stable_erase(key);
    all[key::device] = model.device;
    return all;
}

json::array to_json(const std::vector<Diagnostic>& diagnostics) {
    json::array all;
    for (const Diagnostic& one : diagnostics)
        all.push_back({{"file", one.file.string()},
                       {"line", one.line},
                       {"column", one.column},
                       {"code", to_string(one.error.code)},
                       {"attempt", one.error.attempt},
                       {"remedy", one.error.remedy}});
    return all;
}

Result<ModelSpec> model_from_json(const json::object& json) {
    Report report{"", ""};
    Fields fields{Value{from_json(json), "model", report}, "model: "};
    ModelSpec model;
    if (const auto name = fields.require(key::name, "the sender names its model"))
        if (auto text = name->text()) model.name = std::move(*text);
    read_model(fields, "model: ", "/", FileCheck::none, model);
    auto diagnostics = std::move(report).take();
    if (diagnostics.empty()) return model;
    Error error = std::move(diagnostics.front().error);
    if (!error.remedy.empty()) error.remedy += "; ";
    error.remedy += "the daemon and this program may be of different releases: install one release and restart";
    return error;
}

}  // namespace bulkhead::config

#include "config/fleet_json.h"

#include "config/model_reader.h"
#include "config/words.h"
#include "config/yaml_tree.h"
#include "ipc/dtype.h"

namespace bulkhead::config {
namespace {

namespace json = boost::json;

std::string duration_text(std::chrono::milliseconds duration) { return fmt::format("{}ms", duration.count()); }

json::array to_json(const std::vector<std::int64_t>& dims) {
    json::array array;
    for (const std::int64_t dim : dims) array.push_back(dim);
    return array;
}

json::object to_json(const std::vector<TensorSpec>& tensors) {
    json::object all;
    for (const TensorSpec& tensor : tensors) {
        json::array shape;
        for (const DimRange& dim : tensor.shape)
            shape.push_back(dim.min == dim.max && dim.name.empty() ? json::value(dim.min) : json::value(dim_text(dim)));
        json::object one{{"dtype", to_string(tensor.dtype)}, {"shape", std::move(shape)}};
        if (tensor.out) one["out"] = true;
        all[tensor.name] = std::move(one);
    }
    return all;
}

json::object to_json(const std::vector<ParameterSpec>& parameters) {
    json::object all;
    for (const ParameterSpec& parameter : parameters) {
        json::object& one = all[parameter.name].emplace_object();
        one["type"] = word_of(parameter_type_words, parameter.type);
        if (parameter.default_value)
            one["default"] = std::visit([](const auto& value) { return json::value(value); }, *parameter.default_value);
    }
    return all;
}

json::object to_json(const MethodSpec& method) {
    json::array buckets;
    for (const Bucket& bucket : method.buckets) {
        json::object shapes;
        for (std::size_t i = 0; i < bucket.shapes.size(); ++i)
            shapes[method.inputs[i].name] = to_json(bucket.shapes[i]);
        buckets.push_back(std::move(shapes));
    }
    json::object padding;
    for (const auto& [input, fill] : method.padding) padding[input] = fill;
    json::object warmup;
    for (const auto& [input, dims] : method.warmup) warmup[input] = to_json(dims);
    return {{"inputs", to_json(method.inputs)},   {"parameters", to_json(method.parameters)},
            {"outputs", to_json(method.outputs)}, {"buckets", std::move(buckets)},
            {"padding", std::move(padding)},      {"warmup", std::move(warmup)}};
}

json::object to_json(const GenerateSpec& generate) {
    json::object all{{"prefill_chunk", generate.prefill_chunk}};
    if (generate.slots) all["slots"] = *generate.slots;
    if (generate.length) all["length"] = *generate.length;
    if (!generate.buckets.empty()) all["buckets"] = json::value_from(generate.buckets);
    return all;
}

}  // namespace

json::object to_json(const ModelSpec& model) {
    json::object environment;
    for (const auto& [name, value] : model.environment) environment[name] = value;
    json::object state{{"scope", word_of(scope_words, model.state)}};
    if (!model.reset_method.empty()) state["reset"] = model.reset_method;

    json::object all{{"name", model.name},
                     {"runtime", word_of(runtime_words, model.runtime)},
                     {model.runtime == Runtime::torchscript ? "file" : "package", model.file.string()},
                     {"device", model.device},
                     {"replicas", model.replicas},
                     {"preload", model.preload},
                     {"threads", model.threads},
                     {"graphs", word_of(graphs_words, model.graphs)},
                     {"deadlines",
                      {{"load", duration_text(model.deadlines.load)},
                       {"capture", duration_text(model.deadlines.capture)},
                       {"request", duration_text(model.deadlines.request)},
                       {"drain", duration_text(model.deadlines.drain)},
                       {"kill", duration_text(model.deadlines.kill)}}},
                     {"queue", model.queue_bound},
                     {"channel",
                      {{"input", model.channel.input_bytes},
                       {"output", model.channel.output_bytes},
                       {"max", model.channel.bytes_max},
                       {"count", model.channel.channels_max},
                       {"worker_max", model.channel.worker_bytes_max},
                       {"idle", duration_text(model.channel.idle)},
                       {"huge_pages", model.channel.huge_pages},
                       {"spin_us", 0}}},
                     {"environment", std::move(environment)},
                     {"restart", word_of(restart_words, model.restart)},
                     {"state", std::move(state)},
                     {"log_level", word_of(log_level_words, model.log_level)},
                     {"core_dump", model.core_bytes_max}};
    if (model.watchdog.count() > 0) all["watchdog"] = duration_text(model.watchdog);
    if (model.runtime == Runtime::generate) all["generate"] = to_json(model.generate);
    if (!model.methods.empty()) {
        json::object methods;
        for (const MethodSpec& method : model.methods) methods[method.name] = to_json(method);
        all["methods"] = std::move(methods);
    }
    return all;
}

Result<ModelSpec> model_from_json(const json::object& json) {
    Report report{"", ""};
    Fields fields{Value{from_json(json), "model", report}, "model: "};
    ModelSpec model;
    if (const auto name = fields.require("name", "the sender names its model"))
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

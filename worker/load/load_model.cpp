#include <limits>

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>
#include <torch/version.h>

#include "worker/file/model_file.h"
#include "worker/generation/models/package.h"
#include "worker/model/describe.h"
#include "worker/model/load_limits.h"
#include "worker/model/read_ahead.h"
#include "worker/package/package_cache.h"
#include "worker/package/package_metadata.h"
#include "worker/torch/device_model.h"
#include "worker/torch/function.h"
#include "worker/torch/inference_threads.h"
#include "worker/torch/outputs.h"
#include "worker/torch/runtime.h"
#include "worker/torch/torchscript_runtime.h"

namespace bulkhead::worker {
namespace {

/// Holds the results of a warm-up.
class HeapSink final : public OutputSink {
public:
    Result<std::span<std::byte>> allocate(std::string_view /*name*/, wire::DType dtype,
                                          std::span<const std::int64_t> dims) override {
        const at::IntArrayRef sizes{dims.data(), dims.size()};
        kept_.push_back(at::empty(sizes, at::TensorOptions{}.dtype(scalar_type(dtype))));
        return std::span{static_cast<std::byte*>(kept_.back().data_ptr()), kept_.back().nbytes()};
    }

private:
    std::vector<at::Tensor> kept_;
};

/// The inputs of one warm-up call of a method.
struct Example {
    std::vector<std::vector<std::int64_t>> shapes;
    std::vector<config::ParameterValue> parameters;

    static Example of(const config::MethodSpec& method) {
        Example example;
        for (const auto& input : method.inputs) {
            std::vector<std::int64_t> dims;
            for (const auto& range : input.shape) dims.push_back(range.min);
            const auto declared = method.warmup.find(input.name);
            example.shapes.push_back(declared == method.warmup.end() ? dims : declared->second);
        }
        for (const auto& parameter : method.parameters)
            example.parameters.push_back(parameter.default_value.value_or(zero(parameter.type)));
        return example;
    }

    std::vector<at::Tensor> zeros(const config::MethodSpec& method, c10::Device device) const {
        std::vector<at::Tensor> tensors;
        for (std::size_t i = 0; i < shapes.size(); ++i)
            tensors.push_back(
                at::zeros(shapes[i], at::TensorOptions{}.dtype(scalar_type(method.inputs[i].dtype)).device(device)));
        return tensors;
    }

    std::string text(const config::MethodSpec& method) const {
        std::string all;
        for (std::size_t i = 0; i < shapes.size(); ++i)
            all += fmt::format("{}{} {}", i == 0 ? "" : ", ", method.inputs[i].name,
                               describe(std::span<const std::int64_t>{shapes[i]}));
        return all;
    }

private:
    static config::ParameterValue zero(config::ParameterType type) {
        switch (type) {
        case config::ParameterType::number: return 0.0;
        case config::ParameterType::boolean: return false;
        case config::ParameterType::string: return std::string{};
        case config::ParameterType::integer: break;
        }
        return std::int64_t{0};
    }
};

class LoadedModel final : public DeviceModel {
public:
    static Result<std::unique_ptr<Model>> load(const config::ModelSpec& spec, const LoadContext& context);

    Result<> run(const config::MethodSpec& method, std::span<const TensorView> inputs,
                 const std::vector<config::ParameterValue>& parameters, OutputSink& sink) override {
        return guarded(fmt::format("running {}", method.name), ErrorCode::inference_failed,
                       [&] { return device_->run(*runtime_, method, inputs, parameters, sink); });
    }

    Result<> reset() override {
        return guarded(fmt::format("calling {}", spec_.reset_method), ErrorCode::inference_failed, [&]() -> Result<> {
            runtime_->reset();
            return {};
        });
    }

    [[nodiscard]] bool writes_inputs() const noexcept override {
        // A GPU has copies.
        return device_->device().is_cpu() && (package_writes_inputs_ || runtime_->writes_inputs());
    }

private:
    LoadedModel(const config::ModelSpec& spec, const LoadContext& context)
        : DeviceModel{inference_threads(spec), spec.methods}, spec_{spec}, context_{context} {}

    Result<> load_runtime();
    Result<> load_torchscript_file(const ModelFile& file);
    Result<> load_package(const ModelFile& file);
    Result<> use_device(std::uint64_t bytes);
    Result<> warm_up(config::MethodSpec& method);
    Result<> infer_once(const config::MethodSpec& method);

    config::ModelSpec spec_;
    LoadContext context_;
    UnpackedPackage package_;  // outlives what was loaded from it
    std::unique_ptr<Runtime> runtime_;
    bool package_writes_inputs_ = false;
};

Result<> check_declaration(const config::ModelSpec& spec, bool cuda) {
    if (spec.methods.empty() && spec.runtime != config::Runtime::generate)
        return Error{ErrorCode::config_invalid, fmt::format("loading {}: no method is declared", spec.name),
                     "declare the method with its inputs' names, dtypes and shapes, which model files do not tell: "
                     "inputs: {x: {dtype: float32, shape: [1, 1..256]}}"};
    if (!cuda && spec.graphs == config::Graphs::required)
        return Error{ErrorCode::config_invalid, fmt::format("loading {}: `graphs: required` on a CPU", spec.name),
                     "graphs need a GPU: give the model one with `device`, or declare `graphs: preferred`"};
    return {};
}

Result<std::unique_ptr<Model>> LoadedModel::load(const config::ModelSpec& spec, const LoadContext& context) {
    std::unique_ptr<LoadedModel> model{new LoadedModel{spec, context}};
    if (auto loaded = model->load_runtime(); !loaded) return loaded.error();

    std::uint64_t warm = 0;
    for (auto& method : model->methods_) {
        context.report("warming", warm++, model->methods_.size(), "steps", method.name);
        if (auto warmed = model->warm_up(method); !warmed) return warmed.error();
    }
    context.report("warming", warm, warm, "steps", "");
    if (context.cuda) model->open_gpu();
    const auto prepare = [&] {
        return model->device_->prepare(model->spec_, model->methods_, *model->runtime_, context);
    };
    if (auto ready = model->guarded("preparing the device", ErrorCode::load_failed, prepare); !ready)
        return ready.error();
    for (const auto& method : model->methods_)
        if (auto answered = model->infer_once(method); !answered) return answered.error();
    if (auto clean = model->reset(); !clean) return clean.error();
    return std::unique_ptr<Model>{std::move(model)};
}

Result<> LoadedModel::load_runtime() {
    auto file = ModelFile::open(spec_.file);
    if (!file) return file.error();
    return guarded(fmt::format("loading {}", spec_.file.string()), ErrorCode::load_failed, [&] {
        return spec_.runtime == config::Runtime::torchscript ? load_torchscript_file(file.value())
                                                             : load_package(file.value());
    });
}

Result<> LoadedModel::use_device(std::uint64_t bytes) {
    auto device = take_device(context_, bytes);
    if (!device) return device.error();
    device_ = std::move(device.value());
    return {};
}

Result<> LoadedModel::load_torchscript_file(const ModelFile& file) {
    if (auto taken = use_device(file.size_bytes()); !taken) return taken.error();
    const auto read = [&](std::uint64_t done) { context_.report("reading", done, file.size_bytes(), "bytes", ""); };
    auto runtime = load_torchscript(file, spec_, device_->device(), methods_, read);
    if (!runtime) return runtime.error();
    runtime_ = std::move(runtime.value());
    // LibTorch reads only what it needs.
    context_.report("reading", file.size_bytes(), file.size_bytes(), "bytes", "");
    return {};
}

Result<> LoadedModel::load_package(const ModelFile& file) {
    const std::uint64_t to_read = 2 * file.size_bytes();  // hashed, then unpacked
    bool was_read = false;
    const auto read = [&](std::uint64_t done) {
        was_read = true;
        context_.report("reading", done, to_read, "bytes", "");
    };
    auto package = PackageCache{context_.cache}.open(file, read);
    if (!package) return package.error();
    // Files other than AOTInductor's are skipped.
    if (was_read) context_.report("reading", to_read, to_read, "bytes", "");
    package_ = std::move(package.value());
    auto compiled = find_compiled_model(package_.folder);
    if (!compiled) return compiled.error().during(spec_.file.string());

    if (auto taken = use_device(file.size_bytes()); !taken) return taken.error();
    const auto machine = Machine::here(context_.cuda ? "cuda" : "cpu", device_->compute_capability());
    if (auto fits = check_compatible(compiled.value(), machine); !fits) return fits.error().during(spec_.file.string());
    const auto name = compiled.value().library.filename().string();
    read_ahead(compiled.value().folder, [&](std::uint64_t done, std::uint64_t total) {
        context_.report("loading", done, total, "bytes", name);
    });
    package_writes_inputs_ = may_write_inputs(compiled.value(), spec_.methods.front().inputs.size());
    auto function = device_->load_function(compiled.value().library.string(), compiled.value().folder.string());
    check_package_declaration(spec_, function->input_count());
    runtime_ = make_aoti_runtime(std::move(function));
    return {};
}

/// Calls the method with zeros until it is warm. Learns its outputs, or checks them.
Result<> LoadedModel::warm_up(config::MethodSpec& method) {
    const auto example = Example::of(method);
    const auto attempt = fmt::format("warming up {} with zeros ({})", method.name, example.text(method));
    std::vector<at::Tensor> outputs;
    auto called = guarded(attempt, ErrorCode::load_failed, [&]() -> Result<> {
        for (int i = 0; i < limits::warmup_runs; ++i)
            outputs = runtime_->call(method, example.zeros(method, device_->device()), example.parameters);
        return {};
    });
    if (!called) {
        auto error = called.error();
        if (error.code == ErrorCode::load_failed)
            error.remedy = "declare inputs as the model takes them; where zeros of the smallest shape are not valid "
                           "input, declare other `warmup` shapes";
        return error;
    }
    if (method.outputs.empty())
        for (std::size_t i = 0; i < outputs.size(); ++i) {
            const auto dtype = dtype_of(outputs[i].scalar_type());
            // An undeclared output only has a known rank.
            const config::DimRange any{0, std::numeric_limits<std::int64_t>::max()};
            method.outputs.push_back({fmt::format("output{}", i), dtype.value_or(wire::DType{}),
                                      std::vector(static_cast<std::size_t>(outputs[i].dim()), any)});
        }
    auto checked = check_outputs(method, outputs, ErrorCode::config_invalid);
    return checked ? Result<>{} : Result<>{checked.error().during(attempt)};
}

/// Runs a whole request, from host memory to host memory.
Result<> LoadedModel::infer_once(const config::MethodSpec& method) {
    return guarded(fmt::format("trying {} once", method.name), ErrorCode::load_failed, [&] {
        const auto example = Example::of(method);
        const auto tensors = example.zeros(method, c10::kCPU);
        std::vector<TensorView> views;
        for (std::size_t i = 0; i < tensors.size(); ++i)
            views.push_back({method.inputs[i].name,
                             method.inputs[i].dtype,
                             example.shapes[i],
                             {static_cast<std::byte*>(tensors[i].data_ptr()), tensors[i].nbytes()}});
        HeapSink sink;
        return device_->run(*runtime_, method, views, example.parameters, sink);
    });
}

}  // namespace

Result<std::unique_ptr<Model>> load_model(const config::ModelSpec& spec, const LoadContext& context) {
    if (auto declared = check_declaration(spec, context.cuda); !declared) return declared.error();
    auto model = spec.runtime == config::Runtime::generate ? generation::load_generator(spec, context)
                                                           : LoadedModel::load(spec, context);
    if (!model) return model.error().during(fmt::format("loading {}", spec.name));
    return model;
}

std::string torch_version() { return TORCH_VERSION; }

}  // namespace bulkhead::worker

#include "worker/torch/torchscript_runtime.h"

#include <algorithm>
#include <map>
#include <string>

#include <ATen/core/dispatch/Dispatcher.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/csrc/jit/ir/alias_analysis.h>
#include <torch/csrc/jit/passes/inliner.h>
#include <torch/csrc/jit/runtime/graph_iterator.h>
#include <torch/csrc/jit/serialization/import.h>

#include "worker/torch/file_reader.h"
#include "worker/torch/outputs.h"
#include "worker/torch/torchscript_schema.h"

namespace bulkhead::worker {
namespace {

using torch::jit::IValue;
using torch::jit::Module;

std::vector<at::Tensor> tensors_in(const IValue& result, const std::string& method) {
    const auto refuse = [&](const std::string& kind) -> std::vector<at::Tensor> {
        throw std::runtime_error{
            fmt::format("{} returned {}; what can be sent is a tensor, or a tuple or list of them", method, kind)};
    };
    if (result.isTensor()) return {result.toTensor()};
    if (result.isTensorList()) return result.toTensorVector();
    if (result.isNone()) return {};
    if (!result.isTuple() && !result.isList()) return refuse(result.tagKind());

    std::vector<at::Tensor> tensors;
    const auto elements = result.isTuple() ? result.toTupleRef().elements().vec() : result.toListRef().vec();
    for (const auto& element : elements) {
        if (!element.isTensor()) return refuse(fmt::format("{} with {}", result.tagKind(), element.tagKind()));
        tensors.push_back(element.toTensor());
    }
    return tensors;
}

struct BoundMethod {
    torch::jit::Method method;
    std::vector<ArgumentSource> arguments;
    bool writes_inputs;
};

/// Whether the operator may return its input although its schema does not say so, as composite
/// operators such as `type_as` and `dropout` do. Alias analysis takes its output for a new tensor.
bool may_return_an_input_unannounced(const torch::jit::Node& node) {
    const c10::FunctionSchema* schema = node.maybeSchema();
    if (schema == nullptr) return false;
    const auto announced = [](const c10::Argument& result) { return result.alias_info() != nullptr; };
    if (std::ranges::any_of(schema->returns(), announced)) return false;
    const auto handle = c10::Dispatcher::singleton().findSchema(schema->operator_name());
    return handle && handle->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd);
}

/// Whether the method may write to its inputs, by LibTorch's alias analysis, which treats
/// unknown operators as writes. A write after an operator that may return its input counts as a
/// write to that input.
bool writes_inputs(const torch::jit::Method& method, const std::vector<ArgumentSource>& arguments, std::size_t inputs) {
    // A copy: the iterator needs a non-const graph.
    std::shared_ptr<torch::jit::Graph> graph = method.graph()->copy();
    torch::jit::Inline(*graph);
    const torch::jit::AliasDb aliases{graph};
    std::vector<torch::jit::Node*> passing;
    torch::jit::DepthFirstGraphNodeIterator nodes{graph};
    while (torch::jit::Node* node = nodes.next())
        if (may_return_an_input_unannounced(*node)) passing.push_back(node);

    std::vector<const torch::jit::Value*> written;
    const auto is_written = [&](const torch::jit::Value* value) {
        return aliases.hasWriters(value) ||
               std::ranges::any_of(written, [&](const auto* other) { return aliases.mayAlias(value, other); });
    };
    for (bool found = true; found;) {
        found = false;
        std::erase_if(passing, [&](torch::jit::Node* node) {
            if (!std::ranges::any_of(node->outputs(), is_written)) return false;
            for (const torch::jit::Value* input : node->inputs()) written.push_back(input);
            return found = true;
        });
    }
    for (std::size_t i = 0; i < arguments.size(); ++i) {
        const auto* input = std::get_if<InputArgument>(&arguments[i]);
        // The graph's first input is the module.
        if (input != nullptr && input->index < inputs && is_written(graph->inputs().at(i + 1))) return true;
    }
    return false;
}

class TorchScriptRuntime final : public Runtime {
public:
    TorchScriptRuntime(Module module, std::map<std::string, BoundMethod> methods,
                       std::optional<torch::jit::Method> reset)
        : module_{std::move(module)}, methods_{std::move(methods)}, reset_{std::move(reset)} {}

    std::vector<at::Tensor> call(const config::MethodSpec& method, const std::vector<at::Tensor>& inputs,
                                 const std::vector<config::ParameterValue>& parameters) override {
        auto& bound = methods_.at(method.name);
        const std::vector<at::Tensor> tensors = with_outs(method, inputs);
        std::vector<IValue> stack;
        stack.reserve(bound.arguments.size());
        for (const auto& source : bound.arguments) {
            if (const auto* input = std::get_if<InputArgument>(&source))
                stack.emplace_back(tensors.at(input->index));
            else if (const auto* parameter = std::get_if<ParameterArgument>(&source))
                std::visit([&](const auto& value) { stack.emplace_back(value); }, parameters.at(parameter->index));
            else
                stack.push_back(std::get<IValue>(source));
        }
        const IValue result = bound.method(std::move(stack));
        return method.takes_outputs() ? outs_of(method, tensors) : tensors_in(result, method.name);
    }

    void reset() override {
        if (reset_) (*reset_)({});
    }

    [[nodiscard]] bool writes_inputs() const noexcept override {
        return std::ranges::any_of(methods_, [](const auto& entry) { return entry.second.writes_inputs; });
    }

private:
    Module module_;
    std::map<std::string, BoundMethod> methods_;
    std::optional<torch::jit::Method> reset_;
};

std::string names_of(const Module& module) {
    std::vector<std::string> names;
    for (const auto& method : module.get_methods()) names.push_back(method.name());
    return fmt::format("{}", fmt::join(names, ", "));
}

Error broken(const ModelFile& file, const std::exception& exception) {
    const auto attempt = fmt::format("loading the TorchScript file {}", file.path().string());
    auto error = translate(exception, ErrorCode::load_failed, attempt);
    if (error.code != ErrorCode::load_failed) return error;
    const auto says = [&](std::string_view words) { return error.attempt.find(words) != std::string::npos; };
    if (says("central directory"))
        error.remedy = fmt::format("its end is missing: it has {} bytes; copy it again", file.size_bytes());
    else if (says("constants.pkl"))
        error.remedy = "it is a zip archive, but not of TorchScript: save the model with torch.jit.save, not "
                       "torch.save; a .pt2 package wants `runtime: aoti`";
    else
        error.remedy = "save it again with torch.jit.save of torch " + torch_version();
    return error;
}

Result<BoundMethod> bind(const Module& module, const config::ModelSpec& spec, config::MethodSpec& method) {
    const auto found = module.find_method(method.name);
    if (!found)
        return Error{ErrorCode::config_invalid,
                     fmt::format("checking method {}: {} has no such method", method.name, spec.file.string()),
                     fmt::format("its methods: {}", names_of(module))};
    auto arguments = match_arguments(found->function().getSchema(), method);
    if (!arguments) return arguments.error();
    const bool writes = writes_inputs(*found, *arguments, method.inputs.size());
    return BoundMethod{*found, std::move(arguments.value()), writes};
}

Result<std::optional<torch::jit::Method>> find_reset(const Module& module, const config::ModelSpec& spec) {
    if (spec.reset_method.empty()) return std::optional<torch::jit::Method>{};
    const auto found = module.find_method(spec.reset_method);
    if (!found)
        return Error{ErrorCode::config_invalid,
                     fmt::format("checking reset: {} has no method \"{}\"", spec.file.string(), spec.reset_method),
                     fmt::format("its methods: {}", names_of(module))};
    const auto& arguments = found->function().getSchema().arguments();
    if (!std::all_of(arguments.begin() + 1, arguments.end(), [](const auto& a) { return a.default_value(); }))
        return Error{
            ErrorCode::config_invalid,
            fmt::format("checking reset: \"{}\" takes {}", spec.reset_method, describe(found->function().getSchema())),
            "name a method that can be called without arguments"};
    return std::optional{*found};
}

}  // namespace

Result<std::unique_ptr<Runtime>> load_torchscript(const ModelFile& file, const config::ModelSpec& spec,
                                                  c10::Device device, std::vector<config::MethodSpec>& methods,
                                                  const std::function<void(std::uint64_t)>& progress) {
    std::optional<Module> module;
    try {
        module = torch::jit::load(std::make_shared<FileReader>(file, progress), device);
        module->eval();
    } catch (const std::exception& exception) {
        return broken(file, exception);
    }
    std::map<std::string, BoundMethod> bound;
    for (auto& method : methods) {
        auto one = bind(*module, spec, method);
        if (!one) return one.error();
        bound.emplace(method.name, std::move(one.value()));
    }
    auto reset = find_reset(*module, spec);
    if (!reset) return reset.error();
    return std::make_unique<TorchScriptRuntime>(std::move(*module), std::move(bound), std::move(reset.value()));
}

}  // namespace bulkhead::worker

#include "worker/cuda/graph_engine.h"

#include <algorithm>
#include <chrono>

#include <ATen/ops/empty.h>
#include <ATen/ops/linspace.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include "worker/cuda/limits.h"
#include "worker/torch/warm_up.h"

namespace bulkhead::worker::cuda {
namespace {

cudaStream_t current_stream() { return c10::cuda::getCurrentCUDAStream().stream(); }

/// Makes an input for warm-up and comparison: floats spread over [-1, 1]; integers and booleans 0,
/// an index that every table has.
at::Tensor static_input(const config::TensorSpec& spec, Shape dims) {
    const at::TensorOptions options = at::TensorOptions{}.dtype(scalar_type(spec.dtype)).device(at::kCUDA);
    if (!isFloatingType(scalar_type(spec.dtype)) && !isComplexType(scalar_type(spec.dtype)))
        return at::zeros(dims, options);
    std::int64_t count = 1;
    for (const std::int64_t size : dims) count *= size;
    return at::linspace(-1, 1, count, options.dtype(at::kFloat)).to(options).reshape(dims).contiguous();
}

std::string output_name(const config::MethodSpec& method, std::size_t index) {
    return index < method.outputs.size() ? method.outputs[index].name : std::to_string(index);
}

std::vector<Shape> shapes_of(const std::vector<at::Tensor>& tensors) {
    std::vector<Shape> shapes;
    for (const at::Tensor& tensor : tensors) shapes.emplace_back(tensor.sizes().data(), tensor.sizes().size());
    return shapes;
}

/// Why this method is not captured at all; empty: it is.
std::string_view why_never(const config::ModelSpec& spec, const config::MethodSpec& method) {
    if (spec.graphs == config::Graphs::off) return eager_reason::graphs_off;
    if (spec.state == config::StateScope::channel) return eager_reason::stateful;
    if (graph_buckets(method).empty()) return eager_reason::no_buckets;
    if (std::ranges::any_of(method.parameters, [](const auto& p) { return !p.default_value; }))
        return "parameter_without_default";
    return {};
}

}  // namespace

Result<> GraphEngine::prepare(const config::ModelSpec& spec, const std::vector<config::MethodSpec>& methods,
                              Runtime& runtime, const LoadContext& context) {
    struct Task {
        const config::MethodSpec* method;
        config::Bucket bucket;
    };
    std::vector<Task> tasks;
    for (const config::MethodSpec& method : methods) {
        Method& known = methods_[method.name];
        known.never = why_never(spec, method);
        if (!known.never.empty()) continue;
        for (const config::ParameterSpec& parameter : method.parameters)
            known.parameters.push_back(*parameter.default_value);
        for (config::Bucket& bucket : graph_buckets(method)) tasks.push_back({&method, std::move(bucket)});
    }
    if (spec.graphs == config::Graphs::off) {
        const std::scoped_lock lock{mutex_};
        mode_ = "off";
        return {};
    }
    if (tasks.empty()) {
        if (spec.graphs != config::Graphs::required) return {};
        const bool stateful = spec.state == config::StateScope::channel;
        return Error{
            ErrorCode::capture_failed, fmt::format("capturing {}: it has nothing to capture", spec.name),
            stateful
                ? "state kept in the module cannot be captured: give it as inputs and outputs, or set graphs: preferred"
                : "declare buckets, and defaults for all parameters, or set graphs: preferred"};
    }
    std::ranges::stable_sort(tasks, std::greater{}, [](const Task& task) { return element_count(task.bucket); });

    pool_.emplace();
    for (std::size_t done = 0; done < tasks.size(); ++done) {
        const auto& [method, bucket] = tasks[done];
        const std::string what = fmt::format("{} {}", method->name, shapes_text(bucket));
        context.report("capturing", done, tasks.size(), "steps", what);

        auto failure = capture(*method, bucket, runtime);
        if (!failure) continue;
        if (spec.graphs == config::Graphs::required)
            return Error{ErrorCode::capture_failed, fmt::format("capturing {}: {}", what, failure->sentence()),
                         fmt::format("{}; or set graphs: preferred to run such requests eagerly", failure->remedy)};
        spdlog::warn("not captured: method={} shapes=\"{}\" cause={} reason=\"{}\" hint=\"{}\"", method->name,
                     shapes_text(bucket), failure->cause, failure->sentence(), failure->remedy);
        methods_[method->name].failed.push_back(bucket);
        const std::scoped_lock lock{mutex_};
        failures_.push_back({method->name, bucket, std::move(*failure)});
    }
    context.report("capturing", tasks.size(), tasks.size(), "steps", "");
    return {};
}

std::optional<CaptureDiagnosis> GraphEngine::capture(const config::MethodSpec& spec, const config::Bucket& bucket,
                                                     Runtime& runtime) {
    const auto start = std::chrono::steady_clock::now();
    Method& method = methods_[spec.name];
    std::vector<at::Tensor> inputs;
    for (std::size_t i = 0; i < spec.inputs.size(); ++i)
        inputs.push_back(static_input(spec.inputs[i], bucket.shapes[i]));
    const auto call = [&] { return runtime.call(spec, inputs, method.parameters); };

    const auto call_seeded = [&] {
        std::vector<at::Tensor> outputs;
        pool_->with_fixed_seed([&] { outputs = call(); });
        return outputs;
    };
    auto [before, eager] = warm_up(inputs, warm_up_runs, call_seeded);
    C10_CUDA_CHECK(cudaStreamSynchronize(current_stream()));
    for (std::size_t i = 0; i < eager.size(); ++i)
        if (!eager[i].is_cuda()) return output_on_cpu(output_name(spec, i));
    if (first_difference(before, eager)) return keeps_state();
    before.clear();
    c10::cuda::CUDACachingAllocator::emptyCache();  // frees what warm-up used for the pool

    CapturePool::Captured captured = pool_->capture(call);
    {
        const std::scoped_lock lock{mutex_};
        pool_bytes_ = pool_->bytes();
    }
    if (captured.failure) {
        C10_CUDA_CHECK(cudaDeviceSynchronize());  // detects a context lost during capture here,
                                                  // not in a request
        return captured.failure;
    }
    pool_->with_fixed_seed([&] { captured.graph->replay(); });
    C10_CUDA_CHECK(cudaStreamSynchronize(current_stream()));
    if (const auto differs = first_difference(eager, captured.outputs))
        return replay_differs(output_name(spec, *differs));

    const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - start;
    const bool may_pad = outputs_follow_inputs(spec, bucket, shapes_of(captured.outputs));
    auto* graph = new Graph{spec.name, bucket,      captured.graph, std::move(inputs), std::move(captured.outputs),
                            may_pad,   took.count()};  // never freed: see CapturePool
    method.buckets.push_back(bucket);
    method.graphs.push_back(graph);
    const std::scoped_lock lock{mutex_};
    mode_ = "captured";
    graphs_.push_back(graph);
    return std::nullopt;
}

std::optional<std::vector<at::Tensor>> GraphEngine::replay(const config::MethodSpec& method,
                                                           std::span<const TensorView> inputs,
                                                           const std::vector<config::ParameterValue>& parameters) {
    const auto found = methods_.find(method.name);
    if (found == methods_.end()) return eagerly(eager_reason::no_buckets);
    const Method& known = found->second;
    if (!known.never.empty()) return eagerly(known.never);
    if (parameters != known.parameters) return eagerly(eager_reason::parameters_differ);

    std::vector<Shape> shapes;
    for (const TensorView& input : inputs) shapes.push_back(input.dims);
    BucketChoice choice = choose_bucket(method, known.buckets, shapes);
    if (!choice.bucket) {
        const bool one_failed = choose_bucket(method, known.failed, shapes).bucket.has_value();
        return eagerly(one_failed ? eager_reason::capture_failed : choice.reason);
    }
    Graph& graph = *known.graphs[*choice.bucket];
    if (choice.padded && !graph.may_pad) return eagerly(eager_reason::padding_ambiguous);

    fill(graph, method, inputs);
    graph.graph->replay();
    {
        const std::scoped_lock lock{mutex_};
        ++graph.hits;
        if (choice.padded) ++graph.pads;
    }
    std::vector<at::Tensor> outputs = graph.outputs;
    for (std::size_t i = 0; choice.padded && i < outputs.size(); ++i)
        for (std::size_t d = 0; d < choice.output_dims[i].size(); ++d)
            if (const std::int64_t size = choice.output_dims[i][d]; size != keep_dim)
                outputs[i] = outputs[i].narrow(static_cast<std::int64_t>(d), 0, size);
    return outputs;
}

void GraphEngine::fill(Graph& graph, const config::MethodSpec& method, std::span<const TensorView> inputs) {
    for (std::size_t i = 0; i < inputs.size(); ++i) {
        const TensorView& input = inputs[i];
        at::Tensor& whole = graph.inputs[i];
        at::Tensor part = whole;
        for (std::size_t d = 0; d < input.dims.size(); ++d)
            part = part.narrow(static_cast<std::int64_t>(d), 0, input.dims[d]);
        if (part.numel() != whole.numel()) whole.fill_(method.padding.at(method.inputs[i].name));
        if (part.is_contiguous()) {
            memory_.fetch(part.data_ptr(), input, current_stream());
        } else {
            const at::Tensor dense = at::empty(input.dims, whole.options());
            memory_.fetch(dense.data_ptr(), input, current_stream());
            part.copy_(dense);
        }
    }
}

std::nullopt_t GraphEngine::eagerly(std::string_view reason) {
    const std::scoped_lock lock{mutex_};
    ++eager_[reason];
    return std::nullopt;
}

boost::json::object GraphEngine::report() const {
    const std::scoped_lock lock{mutex_};
    boost::json::array buckets;
    for (const Graph* graph : graphs_)
        buckets.push_back({{"method", graph->method},
                           {"shapes", boost::json::value_from(graph->bucket.shapes)},
                           {"hits", graph->hits},
                           {"pads", graph->pads},
                           {"capture_ms", graph->capture_ms}});
    boost::json::object eager;
    for (const auto& [reason, count] : eager_) eager[reason] = count;
    boost::json::array failures;
    for (const Failure& failure : failures_)
        failures.push_back({{"method", failure.method},
                            {"shapes", boost::json::value_from(failure.bucket.shapes)},
                            {"cause", failure.diagnosis.cause},
                            {"reason", failure.diagnosis.sentence()},
                            {"remedy", failure.diagnosis.remedy}});
    return {{"mode", mode_},
            {"pool_bytes", pool_bytes_},
            {"buckets", std::move(buckets)},
            {"eager", std::move(eager)},
            {"failures", std::move(failures)}};
}

}  // namespace bulkhead::worker::cuda

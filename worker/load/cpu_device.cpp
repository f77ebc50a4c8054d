#include <atomic>

#include <torch/csrc/inductor/aoti_runner/model_container_runner_cpu.h>

#include "worker/generation/models/fit.h"
#include "worker/generation/models/package.h"
#include "worker/torch/function.h"
#include "worker/torch/outputs.h"
#include "worker/torch/runtime.h"

namespace bulkhead::worker {
namespace {

class CpuDevice final : public Device {
public:
    [[nodiscard]] c10::Device device() const override { return c10::kCPU; }
    [[nodiscard]] std::string name() const override { return "cpu"; }

    std::unique_ptr<Function> load_function(const std::string& library,
                                            const std::string& /*a CPU's kernels lie in the library*/) override {
        return AotiFunction<torch::inductor::AOTIModelContainerRunnerCpu>::load(library, /*num_models=*/1U,
                                                                                /*run_single_threaded=*/true);
    }
    at::Tensor place_weight(const TensorView& weight) override { return as_tensor(weight); }
    [[nodiscard]] std::uint64_t free_bytes() const override { return generation::free_host_bytes(); }
    Result<std::shared_ptr<generation::Engine>> make_engine(generation::Parts parts, config::Graphs /*none here*/,
                                                            const LoadContext& /*nothing to capture*/) override {
        return generation::make_cpu_engine(std::move(parts));
    }

    Result<> run(Runtime& runtime, const config::MethodSpec& method, std::span<const TensorView> inputs,
                 const std::vector<config::ParameterValue>& parameters, OutputSink& sink) override {
        std::vector<at::Tensor> tensors;
        tensors.reserve(inputs.size());
        for (const auto& view : inputs) tensors.push_back(as_tensor(view));
        if (method.takes_outputs())
            for (const config::TensorSpec& output : method.outputs) {
                const Dims dims = dims_of_out(method, output, [&](std::size_t i) { return inputs[i].dims; });
                const auto room = sink.allocate(output.name, output.dtype, dims);
                if (!room) return room.error();
                tensors.push_back(as_tensor({output.name, output.dtype, dims, *room}));
            }
        const auto outputs = runtime.call(method, tensors, parameters);
        runs_.fetch_add(1, std::memory_order_relaxed);
        if (method.takes_outputs()) return {};  // outputs are already where the client reads them
        for (const at::Tensor& output : outputs) copied_bytes_.fetch_add(output.nbytes(), std::memory_order_relaxed);
        return write_outputs(method, outputs, sink);
    }

    [[nodiscard]] boost::json::object graphs() const override {
        return {{"mode", "off"},
                {"pool_bytes", 0},
                {"buckets", boost::json::array{}},
                {"copied_bytes", copied_bytes_.load(std::memory_order_relaxed)},
                {"eager", boost::json::object{{"a CPU has no graphs", runs_.load(std::memory_order_relaxed)}}}};
    }

private:
    std::atomic<std::uint64_t> runs_ = 0;
    std::atomic<std::uint64_t> copied_bytes_ = 0;  ///< of outputs
};

}  // namespace

std::unique_ptr<Device> make_cpu_device() { return std::make_unique<CpuDevice>(); }

}  // namespace bulkhead::worker

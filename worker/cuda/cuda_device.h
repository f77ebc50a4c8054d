#pragma once

#include <array>
#include <memory>
#include <optional>

#include <c10/cuda/CUDAStream.h>

#include "worker/cuda/graph_engine.h"
#include "worker/cuda/host_memory.h"
#include "worker/torch/runtime.h"

namespace bulkhead::worker::cuda {

/// The one GPU that CUDA_VISIBLE_DEVICES names.
///
/// Runs everything on one non-default stream, so that it can be captured; requests come one at a
/// time. If a request's results go to the host, it ends with a blocking wait, without spinning. If
/// they stay on the device, it is handed over in stream order, with at most `queued_requests_max`
/// unfinished. Only `load_function`, `prepare`, `run` and `register_host_memory` make a CUDA
/// context; they run after the grant.
class CudaDevice final : public Device {
public:
    /// Asks the driver for the GPU; makes no context and allocates nothing.
    /// Errors  load_failed: no driver, no GPU, or a GPU that this LibTorch's CUDA does not support
    static Result<std::unique_ptr<Device>> create();

    [[nodiscard]] c10::Device device() const override { return {c10::kCUDA, 0}; }
    [[nodiscard]] std::string name() const override { return name_; }
    [[nodiscard]] std::string compute_capability() const override { return compute_capability_; }
    std::unique_ptr<Function> load_function(const std::string& library, const std::string& cubin_folder) override;
    at::Tensor place_weight(const TensorView& weight) override;
    [[nodiscard]] std::uint64_t free_bytes() const override;
    Result<std::shared_ptr<generation::Engine>> make_engine(generation::Parts parts, config::Graphs graphs,
                                                            const LoadContext& context) override;
    Result<> prepare(const config::ModelSpec& spec, const std::vector<config::MethodSpec>& methods, Runtime& runtime,
                     const LoadContext& context) override;
    Result<> run(Runtime& runtime, const config::MethodSpec& method, std::span<const TensorView> inputs,
                 const std::vector<config::ParameterValue>& parameters, OutputSink& sink) override;
    void register_host_memory(std::span<std::byte> bytes) override { memory_.add(bytes); }
    void unregister_host_memory(std::span<std::byte> bytes) noexcept override { memory_.remove(bytes); }
    [[nodiscard]] boost::json::object graphs() const override;

private:
    CudaDevice(std::string name, std::string compute_capability);
    c10::cuda::CUDAStream stream();
    std::vector<at::Tensor> run_eagerly(Runtime& runtime, const config::MethodSpec& method,
                                        std::span<const TensorView> inputs,
                                        const std::vector<config::ParameterValue>& parameters);
    Result<> deliver(const config::MethodSpec& method, const std::vector<at::Tensor>& outputs, OutputSink& sink);

    std::string name_;
    std::string compute_capability_;
    std::optional<c10::cuda::CUDAStream> stream_;  ///< made at first use, which makes the context
    // Events are never freed, like the graphs.
    /// Of the latest requests, used in turn.
    std::array<cudaEvent_t, queued_requests_max> finished_{};
    std::size_t turn_ = 0;
    cudaEvent_t reset_ = nullptr;  ///< after the default stream's work that a request must wait for
    HostMemory& memory_;
    GraphEngine& engine_;
};

/// Crashes this process if its CUDA context is lost: after an illegal address, a failed assertion
/// or a lost device, every further call fails. The supervisor then reclaims and restarts it.
void end_if_context_is_lost();

/// Explains a LibTorch exception. Adds the device's free memory if there was too little.
[[nodiscard]] Error explain(const std::exception& exception, ErrorCode code, std::string_view attempt);

/// Makes the engine of a GPU. One graph runs a whole step: inputs from the slots' states, decode,
/// sampler, states. The load captures it for 1, 2, 4, 8 … sequences times each attention length,
/// largest first, in one pool. State, parameters and results have fixed addresses, so graphs are
/// never captured again. The host launches a step before it has read the previous one; the GPU
/// writes results to pinned buffers in turn.
///
/// Nothing is freed before the process ends.
///
/// Thread  the requests' thread
/// Errors  out_of_memory, also during capture if graphs are `required`; capture_failed if they are
[[nodiscard]] Result<std::shared_ptr<generation::Engine>> make_generation_engine(generation::Parts parts,
                                                                                 config::Graphs graphs,
                                                                                 const LoadContext& context,
                                                                                 c10::cuda::CUDAStream stream);

}  // namespace bulkhead::worker::cuda

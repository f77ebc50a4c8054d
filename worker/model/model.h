#pragma once

/// What the worker's event loop knows of a model: no LibTorch type, so only few files pay for its headers.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <boost/json.hpp>

#include "config/fleet.h"
#include "ipc/base/error.h"
#include "ipc/channel/wire.h"

namespace bulkhead::cuda {
class Gpu;
}

namespace bulkhead::worker {

namespace generation {
class Engine;
}

/// A contiguous tensor that lies in a slab, or wherever its owner keeps it.
struct TensorView {
    std::string_view name;
    wire::DType dtype{};
    std::span<const std::int64_t> dims;
    std::span<std::byte> bytes;
    bool on_device = false;  ///< the bytes are addresses of the model's GPU, which nobody reads on the host
};

/// Where results go. Called once per output, in the order of the method's outputs.
class OutputSink {
public:
    virtual ~OutputSink() = default;
    /// Room for one output in the channel's slab, 64-byte aligned; the model writes it once.
    /// Errors  resources_exhausted: the client holds too many outputs
    virtual Result<std::span<std::byte>> allocate(std::string_view name, wire::DType dtype,
                                                  std::span<const std::int64_t> dims) = 0;

    /// Whether that room lies in the memory of the model's GPU: one answer for a whole request.
    [[nodiscard]] virtual bool on_device() const noexcept { return false; }
    /// For a model on a GPU, whose client hands over in stream order; `stream` is a CUstream. What it queues there
    /// after this call runs behind the client's work on the inputs, and behind its reads of what it has released.
    virtual Result<> begin_on(void* /*stream*/) { return {}; }
    /// All work of the request is queued on the stream. Where the room is on the device the client waits for it by
    /// itself; else the model waits, and has no need to call this.
    virtual Result<> end_on(void* /*stream*/) { return {}; }
};

/// Whether a queued run still reads memory that the client may write again as soon as it has the result: one on the GPU
/// is written in stream order, one on the host is not.
[[nodiscard]] inline bool reads_host(std::span<const TensorView> inputs) {
    return std::ranges::any_of(inputs,
                               [](const TensorView& input) { return !input.on_device && !input.bytes.empty(); });
}

/// Told during a load; all functions may be called from the loading thread.
struct LoadContext {
    std::filesystem::path cache;  ///< $BULKHEAD_CACHE, where packages are unpacked
    bool cuda = false;            ///< the supervisor gave this worker a GPU, visible as cuda:0
    std::function<void(std::string_view phase, std::uint64_t done, std::uint64_t total, std::string_view unit,
                       std::string_view detail)>
        progress;
    /// Asks the supervisor for the grant and waits for it; before the first device allocation.
    std::function<Result<>(std::uint64_t device_bytes)> wait_for_grant;
};

/// One loaded model.
///
/// Thread  `run` and `reset` on one thread at a time; `methods` and `graphs` on any
class Model {
public:
    virtual ~Model() = default;

    /// What was declared, completed by what the file tells.
    [[nodiscard]] virtual const std::vector<config::MethodSpec>& methods() const noexcept = 0;

    /// Runs one method. Inputs stand in the order of the method's inputs, are checked against it by
    /// `check_inputs`, and are used in place: no copy on a CPU. Parameters are complete and typed.
    /// Errors  inference_failed with the model's own words, out_of_memory, those of the sink
    virtual Result<> run(const config::MethodSpec& method, std::span<const TensorView> inputs,
                         const std::vector<config::ParameterValue>& parameters, OutputSink& sink) = 0;

    /// Calls the declared reset method: state of one channel never reaches the next.
    virtual Result<> reset() = 0;

    /// Host memory that the device reads directly, such as an input slab: registered with CUDA on a GPU.
    virtual void register_host_memory(std::span<std::byte> bytes) = 0;
    virtual void unregister_host_memory(std::span<std::byte> bytes) noexcept = 0;

    /// The GPU in whose memory inputs and outputs may lie; none on a CPU.
    [[nodiscard]] virtual std::shared_ptr<const bulkhead::cuda::Gpu> gpu() const { return nullptr; }

    /// Whether a run may write into its inputs in place. Loans are read-only, so such a model gets none.
    [[nodiscard]] virtual bool writes_inputs() const noexcept { return false; }

    /// What steps a generating model's sequences; it lives as long as the model. Such a model serves the method
    /// `generate` besides those of `methods`, which run between two steps. Null for any other model.
    [[nodiscard]] virtual generation::Engine* generator() noexcept { return nullptr; }

    /// Counters, as in `docs/worker-link.md`.
    [[nodiscard]] virtual boost::json::object graphs() const = 0;

    /// "cpu" or "NVIDIA H100 (GPU-…)".
    [[nodiscard]] virtual std::string device_name() const = 0;
};

/// Loads, warms up, captures and runs one inference of every method; what it returns is ready.
/// Errors  load_failed, package_incompatible, config_invalid, capture_failed, out_of_memory
[[nodiscard]] Result<std::unique_ptr<Model>> load_model(const config::ModelSpec& spec, const LoadContext& context);

/// Version of the LibTorch in this process, such as "2.11.0".
[[nodiscard]] std::string torch_version();

/// Makes this process' context on the visible GPU, before a model asks for it; it stays until the process ends.
/// Errors  load_failed: no CUDA module, driver or GPU; out_of_memory
[[nodiscard]] Result<> make_cuda_context();

/// Puts the request's tensors into `ordered`, in the method's order, and checks names, dtypes, ranks and dims.
/// Errors  input_invalid (missing, surplus, twice), dtype_unsupported, shape_mismatch; each names the
///         tensor, what came and what is declared
[[nodiscard]] Result<> check_inputs(const config::MethodSpec& method, std::span<const TensorView> inputs,
                                    std::vector<TensorView>& ordered);

/// Fills `values` in the method's order: defaults filled in, types checked (an integer passes for a number), nothing
/// surplus.
[[nodiscard]] Result<> check_parameters(const config::MethodSpec& method, const boost::json::object& given,
                                        std::vector<config::ParameterValue>& values);

}  // namespace bulkhead::worker

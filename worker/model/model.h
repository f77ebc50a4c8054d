#pragma once

/// The worker's event loop's view of a model. No LibTorch type, so that few files include
/// its slow headers.

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

/// A contiguous tensor in a slab or other memory. It owns nothing.
struct TensorView {
    std::string_view name;
    wire::DType dtype{};
    std::span<const std::int64_t> dims;
    std::span<std::byte> bytes;
    bool on_device = false;  ///< the bytes are addresses on the model's GPU; the host
                             ///< must not read them
};

/// The target of results. Called once per output, in the order of the method's outputs.
class OutputSink {
public:
    virtual ~OutputSink() = default;
    /// Returns room for one output in the channel's slab, 64-byte aligned. The model
    /// writes it once.
    /// Errors  resources_exhausted: the client holds too many outputs
    virtual Result<std::span<std::byte>> allocate(std::string_view name, wire::DType dtype,
                                                  std::span<const std::int64_t> dims) = 0;

    /// Whether that room lies in GPU memory; the same for all outputs of a request.
    [[nodiscard]] virtual bool on_device() const noexcept { return false; }
    /// For a GPU model whose client exchanges memory in stream order; `stream` is a CUstream. Work
    /// queued on it after this call runs behind the client's work on the inputs, and behind its
    /// reads of memory it has released.
    virtual Result<> begin_on(void* /*stream*/) { return {}; }
    /// Tells that all work of the request is queued on the stream. If the room is on the device,
    /// the client waits for it; else the model waits, and need not call this.
    virtual Result<> end_on(void* /*stream*/) { return {}; }
};

/// Whether a queued run still reads host memory, which the client may overwrite as soon as it has
/// the result. GPU inputs are safe: they are overwritten in stream order.
[[nodiscard]] inline bool reads_host(std::span<const TensorView> inputs) {
    return std::ranges::any_of(inputs,
                               [](const TensorView& input) { return !input.on_device && !input.bytes.empty(); });
}

/// The context of a load. All its functions may be called from the loading thread.
struct LoadContext {
    std::filesystem::path cache;  ///< $BULKHEAD_CACHE, where packages are unpacked
    bool cuda = false;            ///< the supervisor gave this worker a GPU, visible as cuda:0
    std::function<void(std::string_view phase, std::uint64_t done, std::uint64_t total, std::string_view unit,
                       std::string_view detail)>
        progress;
    /// Tells `progress`, if anybody listens.
    void report(std::string_view phase, std::uint64_t done, std::uint64_t total, std::string_view unit,
                std::string_view detail = {}) const {
        if (progress) progress(phase, done, total, unit, detail);
    }
    /// Asks the supervisor for the grant and waits. Call it before the first device allocation.
    std::function<Result<>(std::uint64_t device_bytes)> wait_for_grant;
};

/// One loaded model.
///
/// Thread  `run` and `reset` on one thread at a time; `methods` and `graphs` on any
class Model {
public:
    virtual ~Model() = default;

    /// The declared methods, completed from the file.
    [[nodiscard]] virtual const std::vector<config::MethodSpec>& methods() const noexcept = 0;

    /// Runs one method. Inputs are in the method's order, checked by `check_inputs`, and used in
    /// place: a CPU copies nothing. Parameters are complete and typed.
    /// Errors  inference_failed with the model's own words, out_of_memory, those of the sink
    virtual Result<> run(const config::MethodSpec& method, std::span<const TensorView> inputs,
                         const std::vector<config::ParameterValue>& parameters, OutputSink& sink) = 0;

    /// Calls the declared reset method, so that no channel's state reaches the next.
    virtual Result<> reset() = 0;

    /// Registers host memory that the device reads directly, such as an input slab.
    virtual void register_host_memory(std::span<std::byte> bytes) = 0;
    virtual void unregister_host_memory(std::span<std::byte> bytes) noexcept = 0;

    /// The GPU whose memory may hold inputs and outputs; null on a CPU.
    [[nodiscard]] virtual std::shared_ptr<const bulkhead::cuda::Gpu> gpu() const { return nullptr; }

    /// Whether a run may write to its inputs in place. Lent slabs are read-only, so such a
    /// model gets none.
    [[nodiscard]] virtual bool writes_inputs() const noexcept { return false; }

    /// The engine of a generating model, owned by the model. Such a model serves `generate` besides
    /// its `methods`, which run between two steps. Null for any other model.
    [[nodiscard]] virtual generation::Engine* generator() noexcept { return nullptr; }

    /// Counters, as in `docs/worker-link.md`.
    [[nodiscard]] virtual boost::json::object graphs() const = 0;

    /// "cpu" or "NVIDIA H100 (GPU-…)".
    [[nodiscard]] virtual std::string device_name() const = 0;
};

/// Loads and warms up a model, captures its graphs, and runs each method once. The returned
/// model is ready.
/// Errors  load_failed, package_incompatible, config_invalid, capture_failed, out_of_memory
[[nodiscard]] Result<std::unique_ptr<Model>> load_model(const config::ModelSpec& spec, const LoadContext& context);

/// Version of the LibTorch in this process, such as "2.11.0".
[[nodiscard]] std::string torch_version();

/// Makes this process' context on the visible GPU before a model needs it. It stays until the
/// process ends.
[[nodiscard]] Result<> make_cuda_context();

/// Puts the request's tensors into `ordered`, in the method's order, and checks names, dtypes,
/// ranks and dims.
/// Errors  input_invalid (missing, surplus, twice), dtype_unsupported, shape_mismatch; each names
///         the tensor, what came and what is declared
[[nodiscard]] Result<> check_inputs(const config::MethodSpec& method, std::span<const TensorView> inputs,
                                    std::vector<TensorView>& ordered);

/// Fills `values` in the method's order. Adds defaults, checks types (an integer passes for a
/// number), and rejects surplus parameters.
[[nodiscard]] Result<> check_parameters(const config::MethodSpec& method, const boost::json::object& given,
                                        std::vector<config::ParameterValue>& values);

}  // namespace bulkhead::worker

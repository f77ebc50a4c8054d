#pragma once

/// LibTorch's side of the worker. Included by few files: torch/*.h is slow to compile.

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/core/Tensor.h>

#include "config/fleet.h"
#include "ipc/base/error.h"
#include "worker/model/model.h"

namespace bulkhead::worker {

class Function;
namespace generation {
class Engine;
struct Parts;
}  // namespace generation

/// A loaded model file: methods that take and return tensors on the device.
class Runtime {
public:
    virtual ~Runtime() = default;
    /// Calls a method. If it takes its outputs as arguments, `inputs` may end with room for them,
    /// which it returns.
    /// Throws  what LibTorch throws (c10::Error, std::exception); the caller translates it once
    virtual std::vector<at::Tensor> call(const config::MethodSpec& method, const std::vector<at::Tensor>& inputs,
                                         const std::vector<config::ParameterValue>& parameters) = 0;
    virtual void reset() {}
    /// Whether a method may write to its inputs, apart from `out` arguments.
    [[nodiscard]] virtual bool writes_inputs() const noexcept { return false; }
};

/// A device: moves tensors there and makes calls fast.
class Device {
public:
    virtual ~Device() = default;
    [[nodiscard]] virtual c10::Device device() const = 0;
    [[nodiscard]] virtual std::string name() const = 0;
    /// In the spelling of a package's metadata: "90" on an H100; empty on a CPU.
    [[nodiscard]] virtual std::string compute_capability() const { return {}; }

    /// Loads an unpacked AOTInductor package (`.wrapper.so` or `.so`), single-threaded so that it
    /// can be captured; `cubin_folder` holds its kernels.
    virtual std::unique_ptr<Function> load_function(const std::string& library, const std::string& cubin_folder) = 0;
    /// Places a weight of a generation package from its mapped file; a CPU uses the mapping itself.
    virtual at::Tensor place_weight(const TensorView& weight) = 0;
    /// Memory still free for KV and, on a GPU, weights.
    [[nodiscard]] virtual std::uint64_t free_bytes() const = 0;
    /// Makes the engine that steps the package's functions; captures graphs if the device has them
    /// and `graphs` allows it.
    /// Errors  out_of_memory, capture_failed where graphs are `required`
    virtual Result<std::shared_ptr<generation::Engine>> make_engine(generation::Parts parts, config::Graphs graphs,
                                                                    const LoadContext& context) = 0;

    /// Warms up and captures the declared buckets of every method, largest first.
    /// Errors  capture_failed with cause and remedy where graphs are `required`
    virtual Result<> prepare(const config::ModelSpec& /*spec*/, const std::vector<config::MethodSpec>& /*methods*/,
                             Runtime& /*runtime*/, const LoadContext& /*context*/) {
        return {};  // nothing to capture
    }

    /// Runs one request: views in, results into the sink. On a CPU the runtime's inputs are the
    /// views themselves.
    virtual Result<> run(Runtime& runtime, const config::MethodSpec& method, std::span<const TensorView> inputs,
                         const std::vector<config::ParameterValue>& parameters, OutputSink& sink) = 0;

    /// As `Model`. A CPU reads the memory as it is.
    virtual void register_host_memory(std::span<std::byte> /*bytes*/) {}
    virtual void unregister_host_memory(std::span<std::byte> /*bytes*/) noexcept {}
    [[nodiscard]] virtual boost::json::object graphs() const = 0;
};

/// Makes the CPU device: views become tensors in place, and results are written once into the sink.
[[nodiscard]] std::unique_ptr<Device> make_cpu_device();

/// Loads `libbulkhead_cuda.so` from the program's folder and asks it for the visible GPU.
/// Errors  load_failed if the module, its libraries or the driver are missing
[[nodiscard]] Result<std::unique_ptr<Device>> load_cuda_device();

/// The module's entry point: `extern "C" Device* bulkhead_cuda_device(Error* error)`.
inline constexpr const char* cuda_device_symbol = "bulkhead_cuda_device";

/// Wraps a view as a tensor without ownership. The bytes must outlive it.
[[nodiscard]] at::Tensor as_tensor(const TensorView& view);
[[nodiscard]] at::ScalarType scalar_type(wire::DType dtype);
/// Empty for a type that a channel cannot carry.
[[nodiscard]] std::optional<wire::DType> dtype_of(at::ScalarType type);

/// Translates a LibTorch exception: out_of_memory, inference_failed, capture_failed. Reduces the
/// text to the model's own message; LibTorch's C++ stack is cut off.
[[nodiscard]] Error translate(const std::exception& exception, ErrorCode code, std::string_view attempt);

}  // namespace bulkhead::worker

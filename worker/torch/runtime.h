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

namespace generation {
class Engine;
class Function;
struct Parts;
}  // namespace generation

/// A model file, loaded: methods that take tensors on the device and give tensors on the device.
class Runtime {
public:
    virtual ~Runtime() = default;
    /// Where the method takes its outputs as arguments, the room for them may follow the inputs, and is what is
    /// returned. Throws what LibTorch throws (c10::Error, std::exception); the caller translates once.
    virtual std::vector<at::Tensor> call(const config::MethodSpec& method, const std::vector<at::Tensor>& inputs,
                                         const std::vector<config::ParameterValue>& parameters) = 0;
    virtual void reset() = 0;
    /// Whether a method may write into what it is given, its `out` arguments aside.
    [[nodiscard]] virtual bool writes_inputs() const noexcept { return false; }
};

/// A device: how tensors are brought there, and how calls are made fast.
class Device {
public:
    virtual ~Device() = default;
    [[nodiscard]] virtual c10::Device device() const = 0;
    [[nodiscard]] virtual std::string name() const = 0;
    /// As a package's metadata spells it: "90" on an H100; empty on a CPU.
    [[nodiscard]] virtual std::string compute_capability() const { return {}; }

    /// Loads an unpacked AOTInductor package (`.wrapper.so` or `.so`) for this device, single-threaded so
    /// that it can be captured; `cubin_folder` is where its kernels lie.
    virtual std::unique_ptr<Runtime> load_aoti(const config::ModelSpec& spec, const std::string& library,
                                               const std::string& cubin_folder) = 0;

    /// The same for a function of a generation package, which is given its weights afterwards.
    virtual std::unique_ptr<generation::Function> load_function(const std::string& library,
                                                                const std::string& cubin_folder) = 0;
    /// A weight of such a package, from where its file is mapped: on a CPU that very memory.
    virtual at::Tensor place_weight(const TensorView& weight) = 0;
    /// Memory that KV, and on a GPU weights, may still take.
    [[nodiscard]] virtual std::uint64_t free_bytes() const = 0;
    /// The engine that steps the package's functions, captured where the device has graphs and `graphs` allows it.
    /// Errors  out_of_memory, capture_failed where graphs are `required`
    virtual Result<std::unique_ptr<generation::Engine>> make_engine(generation::Parts parts, config::Graphs graphs,
                                                                    const LoadContext& context) = 0;

    /// Warms up and captures the declared buckets of every method, largest first.
    /// Errors  capture_failed with cause and remedy where graphs are `required`
    virtual Result<> prepare(const config::ModelSpec& spec, const std::vector<config::MethodSpec>& methods,
                             Runtime& runtime, const LoadContext& context) = 0;

    /// One request: views in, results in the sink. On a CPU the runtime's inputs are the views themselves.
    virtual Result<> run(Runtime& runtime, const config::MethodSpec& method, std::span<const TensorView> inputs,
                         const std::vector<config::ParameterValue>& parameters, OutputSink& sink) = 0;

    virtual void register_host_memory(std::span<std::byte> bytes) = 0;
    virtual void unregister_host_memory(std::span<std::byte> bytes) noexcept = 0;
    [[nodiscard]] virtual boost::json::object graphs() const = 0;
};

/// The CPU: views become tensors in place, results are written once into the sink.
[[nodiscard]] std::unique_ptr<Device> make_cpu_device();

/// Loads `libbulkhead_cuda.so` from beside the program and asks it for the visible GPU.
/// Errors  load_failed when the module, its libraries or the driver are missing
[[nodiscard]] Result<std::unique_ptr<Device>> load_cuda_device();

/// The symbol by which the module is entered: `extern "C" Device* bulkhead_cuda_device(Error* error)`.
inline constexpr const char* cuda_device_symbol = "bulkhead_cuda_device";

/// A view as a tensor that owns nothing. The bytes must outlive it.
[[nodiscard]] at::Tensor as_tensor(const TensorView& view);
[[nodiscard]] at::ScalarType scalar_type(wire::DType dtype);
/// Empty for a type that the channel cannot carry.
[[nodiscard]] std::optional<wire::DType> dtype_of(at::ScalarType type);

/// Translates a LibTorch exception: out_of_memory, inference_failed, capture_failed. The text is cut
/// to the model's own words: the C++ stack that LibTorch appends is left out.
[[nodiscard]] Error translate(const std::exception& exception, ErrorCode code, std::string_view attempt);

}  // namespace bulkhead::worker

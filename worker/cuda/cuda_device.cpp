#include "worker/cuda/cuda_device.h"

#include <bit>
#include <cstdlib>
#include <filesystem>

#include <ATen/Context.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/InferenceMode.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <fmt/format.h>
#include <spdlog/spdlog.h>
#include <torch/csrc/inductor/aoti_runner/model_container_runner_cuda.h>

#include "ipc/cuda/gpu.h"
#include "worker/cuda/capture.h"
#include "worker/generation/models/package.h"
#include "worker/torch/function.h"
#include "worker/torch/outputs.h"

namespace bulkhead::worker::cuda {
namespace {

Error no_gpu(std::string_view call, cudaError_t error) {
    (void)cudaGetLastError();
    return {ErrorCode::load_failed, fmt::format("{}: {}", call, cudaGetErrorString(error)),
            "check that `nvidia-smi` lists the GPU and that its driver is at least as new as LibTorch's CUDA"};
}

std::uintmax_t bytes_in(const std::filesystem::path& folder) {
    std::uintmax_t total = 0;
    std::error_code ignored;
    for (const auto& entry : std::filesystem::directory_iterator{folder, ignored})
        if (entry.is_regular_file(ignored)) total += entry.file_size(ignored);
    return total;
}

}  // namespace

void end_if_context_is_lost() {
    (void)cudaGetLastError();
    const cudaError_t error = cudaDeviceSynchronize();
    if (error == cudaSuccess) return;
    spdlog::critical("the CUDA context is lost: {}; the worker ends", cudaGetErrorString(error));
    std::abort();
}

Error explain(const std::exception& exception, ErrorCode code, std::string_view attempt) {
    if (const auto* told = dynamic_cast<const ErrorException*>(&exception)) return told->error();
    Error error = translate(exception, code, attempt);
    std::size_t free = 0;
    std::size_t total = 0;
    if (error.code == ErrorCode::out_of_memory && cudaMemGetInfo(&free, &total) == cudaSuccess)
        error.attempt += fmt::format(" ({} MiB of the GPU's {} MiB are free)", free >> 20, total >> 20);
    (void)cudaGetLastError();
    return error;
}

// Memory and engine are leaked: what belongs to CUDA ends with the process, never by a destructor.
CudaDevice::CudaDevice(std::string name, std::string compute_capability)
    : name_{std::move(name)},
      compute_capability_{std::move(compute_capability)}, memory_{*new HostMemory}, engine_{*new GraphEngine{memory_}} {
}

Result<std::unique_ptr<Device>> CudaDevice::create() {
    int count = 0;
    if (const cudaError_t error = cudaGetDeviceCount(&count); error != cudaSuccess)
        return no_gpu("looking for a GPU", error);
    if (count == 0) return no_gpu("looking for a GPU", cudaErrorNoDevice);
    cudaDeviceProp properties{};
    if (const cudaError_t error = cudaGetDeviceProperties(&properties, 0); error != cudaSuccess)
        return no_gpu("asking the GPU's properties", error);
    const std::string uuid = bulkhead::cuda::to_string(std::bit_cast<wire::GpuUuid>(properties.uuid));
    return std::unique_ptr<Device>{new CudaDevice{fmt::format("{} ({})", properties.name, uuid),
                                                  fmt::format("{}{}", properties.major, properties.minor)}};
}

c10::cuda::CUDAStream CudaDevice::stream() {
    if (!stream_) {
        at::globalContext().lazyInitDevice(c10::kCUDA);  // initialises LibTorch's allocators before
                                                         // their first use
        c10::cuda::set_device(0);
        stream_ = c10::cuda::getStreamFromPool();
        for (cudaEvent_t& event : finished_)
            C10_CUDA_CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming | cudaEventBlockingSync));
        C10_CUDA_CHECK(cudaEventCreateWithFlags(&reset_, cudaEventDisableTiming));
    }
    return *stream_;
}

boost::json::object CudaDevice::graphs() const {
    boost::json::object report = engine_.report();
    const HostMemory::Copies copies = memory_.copies();
    report["copies"] = {{"host_to_device", copies.host_to_device},
                        {"device_to_host", copies.device_to_host},
                        {"device_to_device", copies.device_to_device}};
    const AllocatorMemory memory = allocator_memory();
    report["allocated_bytes"] = memory.allocated;
    report["reserved_bytes"] = memory.reserved;
    report["peak_bytes"] = memory.peak;
    return report;
}

std::unique_ptr<Function> CudaDevice::load_function(const std::string& library, const std::string& cubin_folder) {
    const c10::cuda::CUDAStreamGuard guard{stream()};
    std::size_t free_bytes = 0;
    std::size_t total_bytes = 0;
    C10_CUDA_CHECK(cudaMemGetInfo(&free_bytes, &total_bytes));
    try {
        return AotiFunction<torch::inductor::AOTIModelContainerRunnerCuda>::load(
            library, /*num_models=*/1U, "cuda:0", cubin_folder, /*run_single_threaded=*/true);
    } catch (const std::exception&) {
        // The package's code only says "API call failed". The numbers tell whether memory
        // was the cause.
        (void)cudaGetLastError();
        const std::uintmax_t needed = bytes_in(std::filesystem::path{library}.parent_path());
        if (needed <= free_bytes) throw;
        throw ErrorException{
            {ErrorCode::out_of_memory,
             fmt::format("its compiled code and what lies beside it are {} MiB, {} MiB of the GPU's {} MiB were free",
                         needed >> 20, free_bytes >> 20, total_bytes >> 20),
             "unload another model or choose another GPU"}};
    }
}

/// Copies through the pinned ring, in stream order; users of the weight run on the same stream.
at::Tensor CudaDevice::place_weight(const TensorView& weight) {
    const c10::cuda::CUDAStreamGuard guard{stream()};
    const at::Tensor placed = at::empty(at::IntArrayRef{weight.dims.data(), weight.dims.size()},
                                        at::TensorOptions{}.dtype(scalar_type(weight.dtype)).device(device()));
    memory_.load(placed.data_ptr(), weight.bytes, stream().stream());
    return placed;
}

std::uint64_t CudaDevice::free_bytes() const {
    std::size_t free = 0;
    std::size_t total = 0;
    C10_CUDA_CHECK(cudaMemGetInfo(&free, &total));
    return free;
}

Result<std::shared_ptr<generation::Engine>> CudaDevice::make_engine(generation::Parts parts, config::Graphs graphs,
                                                                    const LoadContext& context) {
    try {
        const c10::InferenceMode inference;
        const c10::cuda::CUDAStreamGuard guard{stream()};
        memory_.end_loading();
        auto made = make_generation_engine(std::move(parts), graphs, context, stream());
        note_allocator_memory();
        return made;
    } catch (const std::exception& exception) {
        return explain(exception, ErrorCode::load_failed, fmt::format("preparing generation on {}", name_));
    }
}

Result<> CudaDevice::prepare(const config::ModelSpec& spec, const std::vector<config::MethodSpec>& methods,
                             Runtime& runtime, const LoadContext& context) {
    try {
        const c10::InferenceMode inference;
        const c10::cuda::CUDAStreamGuard guard{stream()};
        C10_CUDA_CHECK(cudaDeviceSynchronize());  // the default stream copied the weights
        Result<> prepared = engine_.prepare(spec, methods, runtime, context);
        note_allocator_memory();
        return prepared;
    } catch (const std::exception& exception) {
        return explain(exception, ErrorCode::load_failed, fmt::format("preparing {} on {}", spec.name, name_));
    }
}

Result<> CudaDevice::run(Runtime& runtime, const config::MethodSpec& method, std::span<const TensorView> inputs,
                         const std::vector<config::ParameterValue>& parameters, OutputSink& sink) {
    try {
        const c10::InferenceMode inference;
        const c10::cuda::CUDAStreamGuard guard{stream()};
        // Waits until fewer than `queued_requests_max` requests are unfinished. If the stream is
        // stuck behind the event of a killed client, the request exceeds its deadline here.
        const cudaEvent_t finished = finished_[turn_ % finished_.size()];
        C10_CUDA_CHECK(cudaEventSynchronize(finished));  // at once if never recorded
        if (Result<> ordered = sink.begin_on(stream().stream()); !ordered) return ordered;
        auto outputs = engine_.replay(method, inputs, parameters);
        if (!outputs) outputs = run_eagerly(runtime, method, inputs, parameters);
        Result<> delivered = deliver(method, *outputs, sink);
        if (delivered && sink.on_device()) delivered = sink.end_on(stream().stream());
        C10_CUDA_CHECK(cudaEventRecord(finished, stream().stream()));
        ++turn_;
        if (delivered && sink.on_device() && !reads_host(inputs)) return delivered;
        // Also if the sink refused: the copy engine still reads the request's slab.
        C10_CUDA_CHECK(cudaEventSynchronize(finished));
        return delivered;
    } catch (const std::exception& exception) {
        Error error = explain(exception, ErrorCode::inference_failed, fmt::format("running {}", method.name));
        end_if_context_is_lost();  // else all work is finished now, and nothing reads the slab
        return error;
    }
}

std::vector<at::Tensor> CudaDevice::run_eagerly(Runtime& runtime, const config::MethodSpec& method,
                                                std::span<const TensorView> inputs,
                                                const std::vector<config::ParameterValue>& parameters) {
    // A reset between channels runs on the default stream, which does not wait for this one.
    C10_CUDA_CHECK(cudaEventRecord(reset_, c10::cuda::getDefaultCUDAStream().stream()));
    C10_CUDA_CHECK(cudaStreamWaitEvent(stream().stream(), reset_, 0));

    std::vector<at::Tensor> tensors;
    for (const TensorView& input : inputs) {
        const auto options = at::TensorOptions{}.dtype(scalar_type(input.dtype)).device(device());
        if (input.on_device) {  // used in place
            const at::IntArrayRef dims{input.dims.data(), input.dims.size()};
            tensors.push_back(
                at::for_blob(input.bytes.data(), dims).options(options).target_device(device()).make_tensor());
            continue;
        }
        at::Tensor& tensor = tensors.emplace_back(at::empty(input.dims, options));
        memory_.fetch(tensor.data_ptr(), input, stream().stream());
    }
    std::vector<at::Tensor> outputs = runtime.call(method, tensors, parameters);
    note_allocator_memory();
    return outputs;
}

Result<> CudaDevice::deliver(const config::MethodSpec& method, const std::vector<at::Tensor>& outputs,
                             OutputSink& sink) {
    if (auto checked = check_outputs(method, outputs, ErrorCode::inference_failed); !checked) return checked.error();
    std::vector<at::Tensor> sources;  // kept until the copies are queued: the allocator reuses
                                      // memory in stream order
    for (std::size_t i = 0; i < outputs.size(); ++i) {
        const at::Tensor& source = sources.emplace_back(outputs[i].resolve_conj().resolve_neg().contiguous());
        const std::span<const std::int64_t> dims{source.sizes().data(), source.sizes().size()};
        auto room = sink.allocate(method.outputs[i].name, method.outputs[i].dtype, dims);
        if (!room) return room.error();
        memory_.deliver(*room, sink.on_device(), source.const_data_ptr(), source.is_cuda(), stream().stream());
    }
    return {};
}

}  // namespace bulkhead::worker::cuda

extern "C" __attribute__((visibility("default"))) bulkhead::worker::Device*
bulkhead_cuda_device(bulkhead::Error* error) {
    auto device = bulkhead::worker::cuda::CudaDevice::create();
    if (!device) {
        *error = std::move(device).error();
        return nullptr;
    }
    return std::move(device)->release();
}

#include <filesystem>

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <fmt/format.h>
#include <torch/csrc/inductor/aoti_runner/model_container_runner_cuda.h>

#include "worker/cuda/cuda_device.h"
#include "worker/torch/function.h"

namespace bulkhead::worker::cuda {
namespace {

std::uintmax_t bytes_in(const std::filesystem::path& folder) {
    std::uintmax_t total = 0;
    std::error_code ignored;
    for (const auto& entry : std::filesystem::directory_iterator{folder, ignored})
        if (entry.is_regular_file(ignored)) total += entry.file_size(ignored);
    return total;
}

}  // namespace

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
        throw ErrorException{{ErrorCode::out_of_memory,
                              fmt::format("its compiled code and what lies beside it are {} MiB, {} MiB of the GPU's {} MiB were free",
                                          needed >> 20, free_bytes >> 20, total_bytes >> 20),
                              "unload another model or choose another GPU"}};
    }
}

}  // namespace bulkhead::worker::cuda

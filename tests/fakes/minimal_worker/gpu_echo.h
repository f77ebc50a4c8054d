#pragma once

#include <atomic>
#include <memory>
#include <span>

#include "ipc/cuda/gpu.h"
#include "worker/model/model.h"

namespace bulkhead::worker {

/// The device of a model that gives its inputs back: copies on one stream, by the driver alone, so
/// it runs on the fake driver and on a GPU alike. `MINIMAL_GPU_SLABS` asks for it.
///
/// Thread  the executor; `graphs` on any
class GpuEcho {
public:
    /// GPU 0 of those that this process sees. Errors  load_failed
    static Result<std::unique_ptr<GpuEcho>> open();

    [[nodiscard]] const std::shared_ptr<const cuda::Gpu>& gpu() const noexcept { return gpu_; }
    [[nodiscard]] boost::json::object graphs() const {
        return {{"mode", "off"}, {"copies", {{"any", copies_.load()}}}};
    }

    Result<> run(const config::MethodSpec& method, std::span<const TensorView> inputs, OutputSink& sink);

private:
    explicit GpuEcho(std::shared_ptr<const cuda::Gpu> gpu) : gpu_{std::move(gpu)} {}
    std::shared_ptr<const cuda::Gpu> gpu_;
    cuda::CUstream stream_ = nullptr;
    std::atomic<std::uint64_t> copies_ = 0;
};

}  // namespace bulkhead::worker

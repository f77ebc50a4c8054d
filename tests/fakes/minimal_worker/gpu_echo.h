#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <span>

#include "ipc/cuda/gpu.h"
#include "tests/fakes/minimal_worker/echo_graphs.h"
#include "worker/model.h"

namespace bulkhead::worker {

/// The device of a model that gives its inputs back: copies on one stream, by the driver alone, so it runs on the fake
/// driver and on a GPU alike. `MINIMAL_GPU_SLABS` asks for it. With `graph_slabs`, a model of one method has EchoGraphs.
///
/// Thread  the executor; `graphs` on any
class GpuEcho {
public:
    /// GPU 0 of those that this process sees. Errors  load_failed, those of GraphPlaces and EchoGraphs
    static Result<std::unique_ptr<GpuEcho>> open(const config::ModelSpec& spec);

    [[nodiscard]] const std::shared_ptr<const cuda::Gpu>& gpu() const noexcept { return gpu_; }
    [[nodiscard]] const std::shared_ptr<GraphPlaces>& places() const noexcept { return places_; }
    [[nodiscard]] boost::json::object graphs() const {
        boost::json::object report{{"mode", graphs_ ? "captured" : "off"}, {"copies", {{"any", copies_.load()}}}};
        if (graphs_) {
            report["buckets"] = graphs_->report();
            report["places"] = places_->report();
        }
        return report;
    }

    Result<> run(const config::MethodSpec& method, std::span<const TensorView> inputs, OutputSink& sink);

private:
    explicit GpuEcho(std::shared_ptr<const cuda::Gpu> gpu) : gpu_{std::move(gpu)} {}
    Result<> copy_each(const config::MethodSpec& method, std::span<const TensorView> inputs, OutputSink& sink);
    std::shared_ptr<const cuda::Gpu> gpu_;
    std::shared_ptr<GraphPlaces> places_;
    std::unique_ptr<EchoGraphs> graphs_;
    cuda::CUstream stream_ = nullptr;
    std::atomic<std::uint64_t> copies_ = 0;
};

}  // namespace bulkhead::worker

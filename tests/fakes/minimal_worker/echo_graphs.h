#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include <boost/json/array.hpp>

#include "ipc/cuda/gpu.h"
#include "worker/graph_places.h"
#include "worker/model.h"

namespace bulkhead::worker {

/// The graphs of a model that gives its inputs back, as far as the driver alone can have them: what each bucket's run
/// does is recorded at load, with the addresses of then, and done again for each request. One recording has buffers of
/// its own, to and from which a request's tensors are copied; one more is made for each graph place.
///
/// Thread  the executor; `report` on any
class EchoGraphs {
public:
    /// For the buckets of the method. Each recording is tried once. Errors  of the driver
    static Result<std::unique_ptr<EchoGraphs>> record(const std::shared_ptr<const cuda::Gpu>& gpu,
                                                      const config::MethodSpec& method, cuda::CUstream stream,
                                                      std::shared_ptr<GraphPlaces> places);

    /// Tensors that were copied, to a recording's buffers and from them; empty: no bucket has these shapes.
    Result<std::optional<std::uint64_t>> replay(const config::MethodSpec& method, std::span<const TensorView> inputs,
                                                OutputSink& sink);
    [[nodiscard]] boost::json::array report() const;

private:
    /// One copy from an input to the output like it: this model's whole work.
    struct Step {
        cuda::CUdeviceptr to;
        cuda::CUdeviceptr from;
        std::size_t bytes;
    };
    using Recording = std::vector<Step>;
    struct Bucket {
        config::Bucket shapes;
        GraphPlaces::Layout at;  ///< of its inputs, and of its outputs, which are as long
        Recording own;
        std::vector<Recording> placed;
        std::atomic<std::uint64_t> hits = 0;
        std::atomic<std::uint64_t> in_place = 0;
    };
    EchoGraphs(std::shared_ptr<const cuda::Gpu> gpu, cuda::CUstream stream, std::shared_ptr<GraphPlaces> places)
        : gpu_{std::move(gpu)}, stream_{stream}, places_{std::move(places)} {}
    [[nodiscard]] Bucket* find(std::span<const TensorView> inputs);
    Result<> do_again(const Recording& recording) const;
    Result<> copy(void* to, const void* from, std::size_t bytes) const;

    const std::shared_ptr<const cuda::Gpu> gpu_;
    const cuda::CUstream stream_;
    const std::shared_ptr<GraphPlaces> places_;
    std::deque<Bucket> buckets_;
};

}  // namespace bulkhead::worker

#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/core/Tensor.h>
#include <boost/json.hpp>

#include "worker/bucket_choice.h"
#include "worker/cuda/capture.h"
#include "worker/cuda/host_memory.h"
#include "worker/graph_places.h"
#include "worker/runtime.h"

namespace bulkhead::worker::cuda {

/// Captures a model's buckets when it is loaded, and replays them for requests that fit.
///
/// A replay is exact or does not happen: each captured graph is replayed once at load and compared with the
/// eager run on the same inputs, a request is padded only where its declaration makes that safe, and what
/// cannot be replayed is left to the caller, with a counted reason. A graph has buffers of its own, to and from which
/// tensors are copied; where there are GraphPlaces it is captured for each of them too, and a request that lies at one
/// is replayed there, with no copy but what such a capture itself needs for outputs that are no arguments of the
/// method.
///
/// Owns    static inputs, graphs and their pool, none of which is ever freed: make it with `new` and keep it
/// Thread  that of the requests, under the module's stream; `report` on any
class GraphEngine {
public:
    explicit GraphEngine(HostMemory& memory) : memory_{memory} {}

    /// Largest bucket first, so that the smaller ones find room in what it left in the pool.
    /// Errors  capture_failed where graphs are `required`: cause and remedy of the first that failed
    /// Throws  what warm-up throws: a model that fails eagerly fails to load
    Result<> prepare(const config::ModelSpec& spec, const std::vector<config::MethodSpec>& methods, Runtime& runtime,
                     std::shared_ptr<GraphPlaces> places, const LoadContext& context);

    struct Replayed {
        /// Device tensors that hold the results until the next call; empty: run it eagerly, the reason is counted.
        std::optional<std::vector<at::Tensor>> outputs = {};
        std::vector<std::span<std::byte>> rooms = {};  ///< for them, leased already; empty: not yet
        bool in_place = false;                         ///< the results lie in those rooms
    };
    /// Errors  the sink's
    Result<Replayed> replay(const config::MethodSpec& method, std::span<const TensorView> inputs,
                            const std::vector<config::ParameterValue>& parameters, OutputSink& sink);

    /// `graphs` of docs/worker-link.md, with `failures`: [{"method","shapes","cause","reason","remedy"}].
    [[nodiscard]] boost::json::object report() const;

private:
    struct Graph {
        std::string method;
        config::Bucket bucket;
        at::cuda::CUDAGraph* graph = nullptr;
        std::vector<at::Tensor> inputs;
        std::vector<at::Tensor> outputs;
        bool may_pad = false;  ///< its outputs are as long as the declaration says
        double capture_ms = 0;
        std::uint64_t hits = 0;  ///< exact ones and padded ones
        std::uint64_t pads = 0;
        std::uint64_t in_place = 0;  ///< of the hits
        GraphPlaces::Layout inputs_at = {};
        GraphPlaces::Layout outputs_at = {};
        std::vector<at::cuda::CUDAGraph*> placed = {};  ///< by place; null where that is not captured
    };
    /// What is known of one method; `buckets[i]` is that of `graphs[i]`.
    struct Method {
        std::vector<config::Bucket> buckets;
        std::vector<Graph*> graphs;
        std::vector<config::Bucket> failed;
        std::vector<config::ParameterValue> parameters;  ///< fixed in the graphs
        std::string_view never;                          ///< the reason why this method is not captured at all
    };
    struct Failure {
        std::string method;
        config::Bucket bucket;
        CaptureDiagnosis diagnosis;
    };

    [[nodiscard]] std::string_view why_never(const config::ModelSpec& spec, const config::MethodSpec& method) const;
    std::optional<CaptureDiagnosis> capture(const config::MethodSpec& spec, const config::Bucket& bucket,
                                            Runtime& runtime);
    Result<> prepare_places(const config::ModelSpec& spec, const std::vector<config::MethodSpec>& methods,
                            Runtime& runtime, const LoadContext& context);
    std::optional<CaptureDiagnosis> try_capture_at(std::size_t place, const config::MethodSpec& spec, Graph& graph,
                                                   Runtime& runtime);
    std::optional<CaptureDiagnosis> capture_at(std::size_t place, const config::MethodSpec& spec, Graph& graph,
                                               Runtime& runtime);
    Result<bool> replay_in_place(Graph& graph, const config::MethodSpec& method, std::span<const TensorView> inputs,
                                 std::vector<std::span<std::byte>>& rooms, OutputSink& sink);
    void fill(Graph& graph, const config::MethodSpec& method, std::span<const TensorView> inputs);
    Replayed eagerly(std::string_view reason);

    HostMemory& memory_;
    std::shared_ptr<GraphPlaces> places_;
    std::optional<CapturePool> pool_;  ///< made by `prepare`: nothing of CUDA before the grant
    std::map<std::string, Method, std::less<>> methods_;

    mutable std::mutex mutex_;  ///< guards what `report` reads: the counters and these
    std::string_view mode_ = "eager";
    std::vector<Graph*> graphs_;  ///< in the order of capture
    std::vector<Failure> failures_;
    std::map<std::string_view, std::uint64_t> eager_;
    std::uint64_t pool_bytes_ = 0;
};

}  // namespace bulkhead::worker::cuda

#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/core/Tensor.h>
#include <boost/json.hpp>

#include "worker/cuda/capture.h"
#include "worker/cuda/host_memory.h"
#include "worker/model/bucket_choice.h"
#include "worker/torch/runtime.h"

namespace bulkhead::worker::cuda {

/// Captures a model's buckets at load and replays them for requests that fit.
///
/// A replay is exact or does not happen. At load, each graph is replayed once and compared with an
/// eager run on the same inputs. A request is padded only if its declaration makes that safe. All
/// other requests are left to the caller, with a counted reason.
///
/// Owns    static inputs, graphs and their pool; none is ever freed: make it with `new` and keep it
/// Thread  the requests' thread, under the module's stream; `report` on any
class GraphEngine {
public:
    explicit GraphEngine(HostMemory& memory) : memory_{memory} {}

    /// Captures the largest bucket first, so that smaller ones reuse its room in the pool.
    /// Errors  capture_failed where graphs are `required`: cause and remedy of the
    ///         first that failed
    /// Throws  what warm-up throws: a model that fails eagerly must not load
    Result<> prepare(const config::ModelSpec& spec, const std::vector<config::MethodSpec>& methods, Runtime& runtime,
                     const LoadContext& context);

    /// Returns device tensors with the results, valid until the next call. Empty: run eagerly; the
    /// reason is counted.
    std::optional<std::vector<at::Tensor>> replay(const config::MethodSpec& method, std::span<const TensorView> inputs,
                                                  const std::vector<config::ParameterValue>& parameters);

    /// `graphs` of docs/worker-link.md, with `failures`:
    /// [{"method","shapes","cause","reason","remedy"}].
    [[nodiscard]] boost::json::object report() const;

private:
    struct Graph {
        std::string method;
        config::Bucket bucket;
        at::cuda::CUDAGraph* graph = nullptr;
        std::vector<at::Tensor> inputs;
        std::vector<at::Tensor> outputs;
        bool may_pad = false;  ///< its outputs have the declared lengths
        double capture_ms = 0;
        std::uint64_t hits = 0;  ///< exact and padded
        std::uint64_t pads = 0;
    };
    /// One method's buckets; `buckets[i]` belongs to `graphs[i]`.
    struct Method {
        std::vector<config::Bucket> buckets;
        std::vector<Graph*> graphs;
        std::vector<config::Bucket> failed;
        std::vector<config::ParameterValue> parameters;  ///< fixed in the graphs
        std::string_view never;                          ///< why this method is not captured at all
    };
    struct Failure {
        std::string method;
        config::Bucket bucket;
        CaptureDiagnosis diagnosis;
    };

    std::optional<CaptureDiagnosis> capture(const config::MethodSpec& spec, const config::Bucket& bucket,
                                            Runtime& runtime);
    void fill(Graph& graph, const config::MethodSpec& method, std::span<const TensorView> inputs);
    std::nullopt_t eagerly(std::string_view reason);

    HostMemory& memory_;
    std::optional<CapturePool> pool_;  ///< made by `prepare`: no CUDA call before the grant
    std::map<std::string, Method, std::less<>> methods_;

    mutable std::mutex mutex_;  ///< guards what `report` reads: the counters and these
    std::string_view mode_ = "eager";
    std::vector<Graph*> graphs_;  ///< in the order of capture
    std::vector<Failure> failures_;
    std::map<std::string_view, std::uint64_t> eager_;
    std::uint64_t pool_bytes_ = 0;
};

}  // namespace bulkhead::worker::cuda

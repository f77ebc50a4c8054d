#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include <boost/json.hpp>

#include "config/fleet.h"
#include "ipc/base/error.h"
#include "ipc/channel/channel_codec.h"
#include "worker/generation/generate_parameters.h"
#include "worker/loop/alarm.h"
#include "worker/model/model.h"
#include "worker/slabs/request_outputs.h"

namespace bulkhead::worker {

struct PendingRequest;

struct Completion {
    std::chrono::microseconds queued{};
    std::chrono::microseconds run{};
    RequestOutputs& outputs;
    boost::json::object values{};  ///< results that are not tensors
};

/// The sender of a request. All calls are on the event loop.
class Requester {
public:
    virtual ~Requester() = default;
    /// Receives a streaming request's tokens since the last part. Comes before the answer.
    virtual void part(const PendingRequest& /*request*/, std::span<const std::int32_t> /*tokens*/) {}
    /// Exactly one of `completed` and `failed` is called, unless the requester
    /// dropped its requests.
    virtual void completed(const PendingRequest& request, Completion completion) = 0;
    virtual void failed(const PendingRequest& request, const Error& error) = 0;
    /// Called last: the model no longer reads the inputs, and `request` holds nothing of the
    /// channel. See `PendingRequest::let_go`.
    virtual void let_go(const PendingRequest& request) = 0;
};

/// One inference that passed every check.
struct PendingRequest {
    std::shared_ptr<Requester> requester;  ///< lives until the model no longer reads its slabs
    std::shared_ptr<ChannelSlabs> slabs;
    std::uint64_t channel = 0;
    std::uint64_t id = 0;
    const config::MethodSpec* method = nullptr;  ///< the model's
    channel::Tensors tensors;                    ///< names and dims of `inputs` lie here
    std::vector<TensorView> inputs;              ///< in the method's order
    std::vector<config::ParameterValue> parameters;
    /// Of a generation request, which has no `parameters`.
    std::unique_ptr<generation::GenerateParameters> generate;
    bool streams = false;
    Clock::time_point received;
    Clock::time_point deadline;
    bool answered = false;  ///< before its end: the result is discarded

    // Written by the executor while the request runs.
    std::optional<RequestOutputs> outputs;
    Result<> result;
    Clock::time_point started;
    Clock::time_point ended;

    /// Returns whether memory ran out for it. Its error then says first that it may be sent again.
    bool ran_out_of_memory();
    /// Answers the request with its result, unless it was answered before. `values`: results that
    /// are not tensors. False: it was answered with an error.
    bool complete(boost::json::object values = {});
    /// Answers the request with `error`. A later result is discarded.
    void fail(const Error& error);
    /// The error of a request that is not complete in time. `how`: "still running".
    [[nodiscard]] Error deadline_passed(std::string_view how, Clock::time_point now, std::string remedy) const;
    /// Ends the request for its requester, which may then let the executor unmap the slabs. Drops
    /// its own reference first: the event loop must never unmap, because that waits for the GPU,
    /// whose work may never end.
    void let_go();
};

using RequestPtr = std::unique_ptr<PendingRequest>;

/// Call it in a catch block, for what a model threw and did not translate. The request fails, not
/// the process.
[[nodiscard]] Error error_of_exception(const std::string& attempt, std::string memory_remedy);

}  // namespace bulkhead::worker

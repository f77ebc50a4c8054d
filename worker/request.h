#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

#include "config/fleet.h"
#include "ipc/channel_codec.h"
#include "ipc/error.h"
#include "worker/alarm.h"
#include "worker/model.h"

namespace bulkhead::worker {

class ChannelSlabs;
class RequestOutputs;
struct Request;

struct Completion {
    std::chrono::microseconds queued{};
    std::chrono::microseconds run{};
    RequestOutputs& outputs;
};

/// Who sent a request. All calls come on the event loop.
class Requester {
public:
    virtual ~Requester() = default;
    /// Exactly one of the two, unless the requester dropped its requests.
    virtual void completed(const Request& request, Completion completion) = 0;
    virtual void failed(const Request& request, const Error& error) = 0;
    /// Last of all: the model no longer reads the inputs, and `request` is about to go.
    virtual void let_go(const Request& request) = 0;
};

/// One inference that passed every check.
struct Request {
    std::shared_ptr<Requester> requester;  ///< lives until the model no longer reads its slabs
    std::shared_ptr<ChannelSlabs> slabs;
    std::uint64_t channel = 0;
    std::uint64_t id = 0;
    const config::MethodSpec* method = nullptr;  ///< the model's
    std::vector<channel::Tensor> tensors;        ///< names and dims of `inputs` lie here
    std::vector<TensorView> inputs;              ///< in the method's order
    std::vector<config::ParameterValue> parameters;
    Clock::time_point received;
    Clock::time_point deadline;
    bool answered = false;  ///< cancelled or out of time while it runs: what it returns is discarded
};

}  // namespace bulkhead::worker

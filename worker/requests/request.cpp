#include "worker/requests/request.h"

#include "worker/slabs/channel_slabs.h"

namespace bulkhead::worker {

void ReturnRequest::operator()(Request* request) const noexcept {
    if (pool == nullptr)
        delete request;
    else
        pool->give_back(*request);
}

bool Request::complete(boost::json::object values) {
    using std::chrono::duration_cast, std::chrono::microseconds;
    if (answered) return true;
    if (result)
        requester->completed(*this, {duration_cast<microseconds>(started - received),
                                     duration_cast<microseconds>(ended - started), *outputs, std::move(values)});
    else
        requester->failed(*this, result.error());
    return result.has_value();
}

void Request::fail(const Error& error) {
    answered = true;
    requester->failed(*this, error);
}

void Request::let_go() {
    outputs.reset();  // takes back outputs that the client did not get
    slabs.reset();
    requester->let_go(*this);
}

RequestPtr RequestPool::take() {
    if (free_.empty()) {
        free_.reserve(made_ + 1);  // giving back must not fail
        auto made = std::make_unique<Request>();
        ++made_;
        return RequestPtr{made.release(), ReturnRequest{this}};
    }
    RequestPtr request{free_.back().release(), ReturnRequest{this}};
    free_.pop_back();
    return request;
}

void RequestPool::give_back(Request& request) noexcept {
    request.outputs.reset();
    request.inputs.clear();
    request.generate.reset();
    request.streams = false;
    request.tensors.clear();
    request.slabs.reset();
    request.requester.reset();
    request.result = Result<>{};
    request.answered = false;
    free_.emplace_back(&request);
}

}  // namespace bulkhead::worker

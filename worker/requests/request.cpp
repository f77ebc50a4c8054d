#include "worker/requests/request.h"

#include "worker/slabs/channel_slabs.h"

namespace bulkhead::worker {

bool PendingRequest::ran_out_of_memory() {
    if (result || result.error().code != ErrorCode::out_of_memory) return false;
    Error error = result.error();
    error.remedy =
        "send it again: on a device under `limits` the daemon makes more room for this model; if that fails, " +
        error.remedy;
    result = std::move(error);
    return true;
}

bool PendingRequest::complete(boost::json::object values) {
    using std::chrono::duration_cast, std::chrono::microseconds;
    if (answered) return true;
    if (result)
        requester->completed(*this, {duration_cast<microseconds>(started - received),
                                     duration_cast<microseconds>(ended - started), *outputs, std::move(values)});
    else
        requester->failed(*this, result.error());
    return result.has_value();
}

void PendingRequest::fail(const Error& error) {
    answered = true;
    requester->failed(*this, error);
}

void PendingRequest::let_go() {
    outputs.reset();  // takes back outputs that the client did not get
    slabs.reset();
    requester->let_go(*this);
}

}  // namespace bulkhead::worker

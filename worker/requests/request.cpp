#include "worker/requests/request.h"

#include <exception>

#include <fmt/format.h>

namespace bulkhead::worker {

using std::chrono::duration_cast;

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
    using std::chrono::microseconds;
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

Error PendingRequest::deadline_passed(std::string_view how, Clock::time_point now, std::string remedy) const {
    using std::chrono::milliseconds;
    return {ErrorCode::deadline_exceeded,
            fmt::format("request {} of method \"{}\" is {} after {} ms, its deadline is {} ms", id, method->name, how,
                        duration_cast<milliseconds>(now - received).count(),
                        duration_cast<milliseconds>(deadline - received).count()),
            std::move(remedy)};
}

void PendingRequest::let_go() {
    outputs.reset();  // takes back outputs that the client did not get
    slabs.reset();
    requester->let_go(*this);
}

Error error_of_exception(const std::string& attempt, std::string memory_remedy) {
    try {
        throw;
    } catch (const std::bad_alloc&) {
        return {ErrorCode::out_of_memory, attempt, std::move(memory_remedy)};
    } catch (const std::exception& exception) {
        return {ErrorCode::inference_failed, fmt::format("{}: {}", attempt, exception.what()), {}};
    } catch (...) {
        return {ErrorCode::inference_failed, attempt + ": it threw something that is not a std::exception", {}};
    }
}

}  // namespace bulkhead::worker

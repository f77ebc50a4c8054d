#pragma once

#include <exception>
#include <string_view>

#include <c10/core/InferenceMode.h>
#include <fmt/format.h>

#include "ipc/base/error.h"
#include "worker/torch/inference_threads.h"
#include "worker/torch/runtime.h"

namespace bulkhead::worker {

/// Calls `work`, which returns a Result<>, with this many threads and without autograd. Turns any
/// exception into an Error: an ErrorException's own error, or what `translate` makes of it.
Result<> guarded(int threads, std::string_view attempt, ErrorCode code, const auto& work) {
    try {
        use_threads(threads);
        const c10::InferenceMode no_autograd;
        return work();
    } catch (const ErrorException& told) {
        return told.error();
    } catch (const std::exception& exception) {
        return translate(exception, code, attempt);
    } catch (...) {  // compiled code may throw anything
        return Error{code, fmt::format("{}: it threw something that is not a std::exception", attempt), {}};
    }
}

}  // namespace bulkhead::worker

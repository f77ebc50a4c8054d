#pragma once

#include <exception>
#include <string_view>
#include <utility>

#include <c10/core/InferenceMode.h>
#include <fmt/format.h>

#include "ipc/base/error.h"
#include "worker/torch/inference_threads.h"
#include "worker/torch/runtime.h"

namespace bulkhead::worker {

/// Calls `work`, which returns a Result<>, with this many threads and without autograd. Turns any
/// exception into an Error: an ErrorException's own error, or what `translate` makes of it.
template <typename Work>
Result<> guarded(int threads, std::string_view attempt, ErrorCode code, Work&& work) {
    try {
        use_threads(threads);
        const c10::InferenceMode no_autograd;
        return std::forward<Work>(work)();
    } catch (const ErrorException& told) {
        return told.error();
    } catch (const std::exception& exception) {
        return translate(exception, code, attempt);
    } catch (...) {  // compiled code may throw anything
        return Error{code, fmt::format("{}: it threw something that is not a std::exception", attempt), {}};
    }
}

}  // namespace bulkhead::worker

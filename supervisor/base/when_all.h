#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "ipc/base/error.h"

namespace bulkhead::supervisor {

/// In both cases the first error is the answer.
enum class OnError { answer_at_once, wait_for_all };

/// Returns `count` callbacks. Passes their results on once, in the order of the callbacks.
template <typename T>
std::vector<std::function<void(Result<T>)>> when_all(std::size_t count, OnError on_error,
                                                     std::function<void(Result<std::vector<T>>)> done) {
    struct Results {
        std::vector<std::optional<T>> values;
        std::size_t left;
        std::function<void(Result<std::vector<T>>)> done;
        std::optional<Error> error{};
    };
    const auto results = std::make_shared<Results>(std::vector<std::optional<T>>(count), count, std::move(done));
    std::vector<std::function<void(Result<T>)>> callbacks;
    for (std::size_t i = 0; i < count; ++i)
        callbacks.push_back([results, on_error, i](Result<T> result) {
            --results->left;
            if (result)
                results->values[i] = std::move(*result);
            else if (!results->error)
                results->error = std::move(result.error());
            if (!results->done || (results->left > 0 && !(results->error && on_error == OnError::answer_at_once)))
                return;
            const auto answer = std::exchange(results->done, nullptr);
            if (results->error) return answer(*results->error);
            std::vector<T> values;
            for (auto& value : results->values) values.push_back(std::move(*value));
            answer(std::move(values));
        });
    return callbacks;
}

}  // namespace bulkhead::supervisor

#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "ipc/base/error.h"

namespace bulkhead::supervisor {

/// Collects the results of several callbacks, in the order of their slots, and passes them on once.
template <typename T>
class WhenAll : public std::enable_shared_from_this<WhenAll<T>> {
public:
    using Done = std::function<void(Result<std::vector<T>>)>;
    enum class OnError { answer_at_once, wait_for_all };  ///< in both cases the first
                                                          ///< error is the answer

    static std::shared_ptr<WhenAll> make(std::size_t count, OnError on_error, Done done) {
        return std::make_shared<WhenAll>(count, on_error, std::move(done));
    }
    WhenAll(std::size_t count, OnError on_error, Done done)
        : values_(count), left_{count}, on_error_{on_error}, done_{std::move(done)} {}

    [[nodiscard]] std::function<void(Result<T>)> slot(std::size_t index) {
        return [self = this->shared_from_this(), index](Result<T> result) { self->take(index, std::move(result)); };
    }

private:
    void take(std::size_t index, Result<T> result) {
        --left_;
        if (result)
            values_[index] = std::move(*result);
        else if (!error_)
            error_ = std::move(result.error());
        if (!done_ || (left_ > 0 && !(error_ && on_error_ == OnError::answer_at_once))) return;
        const Done done = std::exchange(done_, nullptr);
        if (error_) return done(*error_);
        std::vector<T> values;
        for (auto& value : values_) values.push_back(std::move(*value));
        done(std::move(values));
    }

    std::vector<std::optional<T>> values_;
    std::size_t left_;
    OnError on_error_;
    Done done_;
    std::optional<Error> error_;
};

}  // namespace bulkhead::supervisor

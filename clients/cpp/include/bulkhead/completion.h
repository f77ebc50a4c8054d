#pragma once

#include <utility>

#include <boost/asio/any_completion_handler.hpp>
#include <boost/asio/any_io_executor.hpp>
#include <boost/asio/associated_cancellation_slot.hpp>
#include <boost/asio/associated_executor.hpp>
#include <boost/asio/dispatch.hpp>
#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/post.hpp>

#include "ipc/base/error.h"

namespace bulkhead {

/// The handler of a completion token. Called once, with the outcome of one operation.
template <typename T>
using Completion = boost::asio::any_completion_handler<void(Result<T>)>;

/// A completion and its executor. Keeps work on the executor until the call.
template <typename T>
class Completing {
public:
    Completing(Completion<T> handler, const boost::asio::any_io_executor& fallback)
        : work_{boost::asio::get_associated_executor(handler, fallback)}, handler_{std::move(handler)} {}

    [[nodiscard]] auto slot() const noexcept { return boost::asio::get_associated_cancellation_slot(handler_); }

    /// Call it from within the loop, never from the function that started the operation.
    void operator()(Result<T> outcome) && {
        const auto executor = work_.get_executor();
        boost::asio::dispatch(executor, [handler = std::move(handler_), outcome = std::move(outcome)]() mutable {
            std::move(handler)(std::move(outcome));
        });
        work_.reset();
    }

private:
    boost::asio::executor_work_guard<boost::asio::any_completion_executor> work_;
    Completion<T> handler_;
};

}  // namespace bulkhead

#pragma once

#include <exception>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>

#include <boost/asio/awaitable.hpp>
#include <boost/asio/bind_cancellation_slot.hpp>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/this_coro.hpp>
#include <fmt/format.h>

#include "bulkhead/completion.h"

namespace bulkhead {

/// Makes every cancellation end the present wait without an exception; the operation then checks
/// its condition. Call it once per operation: a second call forgets a cancellation.
inline boost::asio::awaitable<void> wait_through_cancellation() {
    co_await boost::asio::this_coro::reset_cancellation_state(boost::asio::enable_total_cancellation());
    co_await boost::asio::this_coro::throw_if_cancelled(false);
}

/// Takes the result of `co_await this_coro::cancellation_state`, fetched once per operation: GCC 12
/// wrongly destroys the temporary of a co_await in a condition that was not evaluated.
[[nodiscard]] inline bool is_cancelled(const boost::asio::cancellation_state& caller) {
    return caller.cancelled() != boost::asio::cancellation_type::none;
}

[[nodiscard]] inline Error cancelled(std::string_view what) {
    return {ErrorCode::cancelled, fmt::format("{}: the caller has cancelled it", what), {}};
}

/// Runs an operation on the loop, and completes with its result. `owner` lives until then.
template <typename T>
void spawn(const boost::asio::any_io_executor& executor, boost::asio::awaitable<Result<T>> operation,
           Completion<T> handler, std::shared_ptr<void> owner = {}) {
    // co_spawn needs a default-constructible value; not every Result is one.
    auto optional = []([[maybe_unused]] std::shared_ptr<void> kept,
                       boost::asio::awaitable<Result<T>> inner) -> boost::asio::awaitable<std::optional<Result<T>>> {
        co_return co_await std::move(inner);
    };
    Completing<T> completing{std::move(handler), executor};
    const auto slot = completing.slot();
    boost::asio::co_spawn(executor, optional(std::move(owner), std::move(operation)),
                          boost::asio::bind_cancellation_slot(
                              slot, [completing = std::move(completing)](std::exception_ptr failure,
                                                                         std::optional<Result<T>> outcome) mutable {
                                  if (failure)
                                      // Out of memory: as in any other handler.
                                      std::rethrow_exception(failure);
                                  std::move(completing)(std::move(*outcome));
                              }));
}

}  // namespace bulkhead

#include <utility>

#include <boost/asio/co_spawn.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/use_awaitable.hpp>

#include "clients/cpp/async/async_channel_state.h"
#include "clients/cpp/async/blocking_threads.h"
#include "clients/cpp/base/limits.h"

namespace bulkhead {

namespace asio = boost::asio;

namespace {

/// Unmaps on another thread: unmapping GPU memory waits for the GPU, which may wait for the loop.
WorkerConnection::Unmapping unmapping_beside(asio::any_io_executor loop) {
    return [loop = std::move(loop)](SlabMemory memory, std::function<void()> then) {
        auto unmap = [loop, memory = std::move(memory), then = std::move(then)]() mutable {
            { const SlabMemory gone{std::move(memory)}; }
            asio::post(loop, std::move(then));
        };
        asio::post(BlockingThreads::unmapping(loop), std::move(unmap));
    };
}

}  // namespace

asio::awaitable<Result<std::shared_ptr<WorkerConnection>>> open_connection(UniqueFd& socket, std::uint64_t channel,
                                                                           const ChannelOptions& options) {
    const asio::any_io_executor loop = co_await asio::this_coro::executor;
    const auto opening = [&]() -> asio::awaitable<Result<std::shared_ptr<WorkerConnection>>> {
        Result<std::shared_ptr<WorkerConnection>> connection =
            WorkerConnection::open(std::move(socket), channel, options);
        if (connection) (*connection)->unmap_gpu_by(unmapping_beside(loop));
        co_return connection;
    };
    co_return co_await asio::co_spawn(BlockingThreads::of(loop), opening, asio::use_awaitable);
}

asio::awaitable<Result<std::shared_ptr<WorkerConnection>>>
connect_connection(std::shared_ptr<AsyncControlState> control, ReconnectingChannel& channel,
                   ReconnectingChannel::Introduction asked) {
    for (;;) {
        Result<Answer> answer =
            co_await control->call("channel.open", asked.params, deadline_in(asked.patience.value_or(limits::call)));
        Result<UniqueFd> socket = channel.introduced(asked, std::move(answer));
        if (!socket) co_return std::move(socket).error();
        Result<std::shared_ptr<WorkerConnection>> connection =
            co_await open_connection(*socket, channel.number(), asked.options);
        if (connection || !channel.ask_again(asked, connection.error())) co_return connection;
    }
}

}  // namespace bulkhead

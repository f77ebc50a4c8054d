#pragma once

#include <cstdint>
#include <memory>

#include <boost/asio/awaitable.hpp>

#include "clients/cpp/async/async_control_state.h"
#include "clients/cpp/channel/reconnecting_channel.h"

namespace bulkhead {

/// Opens a connection, from hello to the last slab, on another thread than the loop's: a worker has
/// 10 s for it. Takes the socket. `channel` is the channel's number.
/// Errors  as `WorkerConnection::open`
boost::asio::awaitable<Result<std::shared_ptr<WorkerConnection>>>
open_connection(UniqueFd& socket, std::uint64_t channel, const ChannelOptions& options);

/// `ReconnectingChannel::connect` for a loop: opens a connection with the worker that the
/// daemon introduces.
boost::asio::awaitable<Result<std::shared_ptr<WorkerConnection>>>
connect_connection(std::shared_ptr<AsyncControlState> control, ReconnectingChannel& channel,
                   ReconnectingChannel::Introduction asked);

}  // namespace bulkhead

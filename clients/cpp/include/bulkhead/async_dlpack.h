#pragma once

#include <memory>
#include <utility>

#include "bulkhead/async_channel.h"
#include "bulkhead/dlpack.h"

namespace bulkhead {

void start_from_dlpack(Completion<ImportedInput> handler, const std::shared_ptr<AsyncChannelState>& channel,
                       DLPackTensor tensor, void* stream);

/// `from_dlpack` for an `AsyncChannel`. Waits for room as `async_allocate` does, then copies a host
/// tensor on the channel's executor; do not change the tensor until then. Completes with
/// Result<ImportedInput>; cancelling ends the wait. Errors  as `from_dlpack`
template <typename Token>
auto async_from_dlpack(const AsyncChannel& channel, DLPackTensor tensor, void* stream, Token&& token) {
    return boost::asio::async_initiate<Token, void(Result<ImportedInput>)>(&start_from_dlpack, token, channel.share(),
                                                                           std::move(tensor), stream);
}

}  // namespace bulkhead

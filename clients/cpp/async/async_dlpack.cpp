#include "bulkhead/async_dlpack.h"

#include <boost/asio/use_awaitable.hpp>

#include "clients/cpp/async/async_channel_state.h"
#include "clients/cpp/async/spawn.h"
#include "clients/cpp/dlpack/dlpack_import.h"

namespace bulkhead {
namespace {

boost::asio::awaitable<Result<ImportedInput>> imported(std::shared_ptr<AsyncChannelState> channel, DLPackTensor tensor,
                                                       void* stream) {
    co_await wait_through_cancellation();
    Result<DLPackImport> import = DLPackImport::of(std::move(tensor), stream);
    if (!import) co_return std::move(import).error();
    if (std::optional<Input> ours = import->exported(); ours && channel->channel().owns(*ours))
        co_return ImportedInput{std::move(*ours), false};
    const std::shared_ptr<const cuda::Gpu> gpu = channel->channel().connection()->gpu();
    if (Result<> possible = import->can_be_copied(gpu.get(), channel->channel().connection()->why_no_gpu()); !possible)
        co_return std::move(possible).error();
    // Named: GCC 12 destroys a closure twice if it is a temporary of a co_await (PR 99576).
    const auto allocate = [&](Completion<Input> handler) {
        channel->allocate(import->dtype(), {import->dims().begin(), import->dims().end()}, import->is_on_gpu(),
                          {std::move(handler), channel->executor()});
    };
    Result<Input> room =
        co_await boost::asio::async_initiate<const boost::asio::use_awaitable_t<>&, void(Result<Input>)>(
            allocate, boost::asio::use_awaitable);
    co_return std::move(*import).copied_into(std::move(room), gpu.get(), channel->channel().connection()->why_no_gpu());
}

}  // namespace

void start_from_dlpack(Completion<ImportedInput> handler, const std::shared_ptr<AsyncChannelState>& channel,
                       DLPackTensor tensor, void* stream) {
    spawn<ImportedInput>(channel->executor(), imported(channel, std::move(tensor), stream), std::move(handler));
}

}  // namespace bulkhead

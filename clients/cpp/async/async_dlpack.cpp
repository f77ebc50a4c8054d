#include "bulkhead/async_dlpack.h"

#include "clients/cpp/async/async_channel_state.h"
#include "clients/cpp/async/spawn.h"
#include "clients/cpp/dlpack/dlpack_import.h"

namespace bulkhead {
namespace {

boost::asio::awaitable<Result<ImportedInput>> imported(std::shared_ptr<AsyncChannelState> channel, DLPackTensor tensor,
                                                       void* stream) {
    Result<DLPackImport> import = DLPackImport::of(std::move(tensor), stream);
    if (!import) co_return std::move(import).error();
    ReconnectingChannel& lines = channel->channel();
    if (std::optional<Input> ours = import->exported(); ours && lines.owns(*ours))
        co_return ImportedInput{std::move(*ours), false};
    const std::shared_ptr<const cuda::Gpu> gpu = lines.session().gpu();
    if (Result<> possible = import->can_be_copied(gpu.get(), lines.session().why_no_gpu()); !possible)
        co_return std::move(possible).error();
    std::vector<std::int64_t> dims{import->dims().begin(), import->dims().end()};
    Result<Input> room = co_await channel->allocate(import->dtype(), std::move(dims), import->is_on_gpu());
    co_return std::move(*import).copied_into(std::move(room), gpu.get(), lines.session().why_no_gpu());
}

}  // namespace

void start_from_dlpack(const std::shared_ptr<AsyncChannelState>& channel, DLPackTensor tensor, void* stream,
                       Completion<ImportedInput> handler) {
    spawn<ImportedInput>(channel->executor(), imported(channel, std::move(tensor), stream), std::move(handler));
}

}  // namespace bulkhead

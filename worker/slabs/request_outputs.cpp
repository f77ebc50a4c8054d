#include "worker/slabs/request_outputs.h"

#include <fmt/format.h>

#include "ipc/channel/tensor_layout.h"

namespace bulkhead::worker {

Result<std::span<std::byte>> RequestOutputs::allocate(std::string_view name, wire::DType dtype,
                                                      std::span<const std::int64_t> dims) {
    if (tensors_.size() == wire::tensors_max)
        return Error{ErrorCode::inference_failed,
                     fmt::format("the model returns more than {} tensors", wire::tensors_max),
                     "return fewer, larger tensors"};
    const Result<std::uint64_t> bytes = tensor_bytes(dtype, dims);
    if (!bytes) return Error{bytes.error()}.during(fmt::format("output \"{}\"", name));
    Result<ChannelSlabs::Room> room = slabs_->allocate_output(*bytes, kind_);
    if (!room) return std::move(room).error().during(fmt::format("output \"{}\" of {} bytes", name, *bytes));
    tensors_.push_back({std::string{name}, dtype, {dims.begin(), dims.end()}, room->lease});
    slabs_->register_with(model_);  // the output's slab may be new
    // The room may have been released, behind an event, since the request began.
    if (on_device() && stream_)
        if (Result<> ordered = slabs_->wait_for_client(*stream_, {}); !ordered) return std::move(ordered).error();
    return room->bytes;
}

Result<> RequestOutputs::begin_on(void* stream) {
    stream_ = static_cast<cuda::CUstream>(stream);
    return slabs_->wait_for_client(*stream_, inputs_);
}

Result<> RequestOutputs::end_on(void* stream) {
    if (!on_device() || tensors_.empty()) return {};
    const Result<std::uint32_t> event = slabs_->record_done(static_cast<cuda::CUstream>(stream));
    if (!event) return event.error();
    for (channel::Tensor& tensor : tensors_) tensor.event_id = *event;
    return {};
}

RequestOutputs::~RequestOutputs() {
    for (const channel::Tensor& tensor : tensors_) (void)slabs_->release(tensor.lease);
}

}  // namespace bulkhead::worker

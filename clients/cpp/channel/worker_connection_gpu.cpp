// Tensors in memory of the GPU that client and worker share.

#include <utility>

#include <fmt/format.h>

#include "clients/cpp/base/protocol_violation.h"
#include "clients/cpp/channel/worker_connection.h"
#include "ipc/channel/tensor_layout.h"
#include "ipc/cuda/gpu.h"

namespace bulkhead {
namespace {

constexpr std::uint64_t gpu_features = wire::feature_cuda_vmm | wire::feature_cuda_ipc;

}  // namespace

/// The kind to ask for: the caller's preferred one if both were agreed.
std::optional<wire::SlabKind> WorkerConnection::gpu_kind() const {
    if (gpu_refused_ || !events_) return std::nullopt;
    const std::uint64_t both = welcome_->features & gpu_features;
    if (both == gpu_features) return gpu_kind_;
    if ((both & wire::feature_cuda_vmm) != 0) return wire::SlabKind::cuda_vmm;
    if ((both & wire::feature_cuda_ipc) != 0) return wire::SlabKind::cuda_ipc;
    return std::nullopt;
}

std::optional<Error> WorkerConnection::why_no_gpu() const {
    if (gpu_refused_) return gpu_refused_;
    if (gpu_kind()) return std::nullopt;
    if (!events_)
        return Error{ErrorCode::input_invalid, "this channel was opened without a GPU",
                     "name the worker's GPU in ChannelOptions::gpu"};
    return Error{ErrorCode::not_permitted,
                 fmt::format("{} shares no memory on {}", welcome_->model, cuda::to_string(events_->gpu()->uuid())),
                 "its worker runs on another device, or its driver cannot share: `bulkhead ps` tells the device"};
}

Result<std::shared_ptr<Input::Lease>>
WorkerConnection::allocate_or_ask(wire::DType dtype, std::span<const std::int64_t> dims, bool on_gpu, bool& asked) {
    const Result<std::uint64_t> bytes = tensor_bytes(dtype, dims);
    if (!bytes) return bytes.error();
    for (std::optional<wire::SlabKind> kind; on_gpu && (kind = gpu_kind());) {
        if (std::shared_ptr<Input::Lease> lease = slabs_.allocate(*bytes, dtype, dims, true)) return lease;
        const Result<bool> grown = grow_on_gpu_or_ask(wire::SlabDirection::input, *bytes, *kind, asked);
        if (!grown) return grown.error();
        if (!*grown) return nullptr;
    }
    return allocate_on_host_or_ask(*bytes, dtype, dims, asked);
}

Result<std::shared_ptr<const Input::Lease>> WorkerConnection::copy_on_gpu(Output::Lease& output, void* stream) {
    const int device = output.slab->memory().gpu.value();
    const auto not_shared = [&](const std::string& why, std::string remedy) {
        return Error{ErrorCode::input_invalid,
                     fmt::format("forwarding \"{}\", which lies on GPU {}; {}", output.tensor.name, device, why),
                     std::move(remedy) + "; or keep that model's outputs in host memory"};
    };
    if (const auto why = why_no_gpu()) return not_shared(why->attempt, why->remedy);
    if (gpu()->device() != device)
        return not_shared(fmt::format("the channel shares GPU {}", gpu()->device()), "place both models on one GPU");
    Result<std::shared_ptr<Input::Lease>> copy = allocate(output.tensor.dtype, output.tensor.dims, true);
    if (!copy) return std::move(copy).error();
    if (!(*copy)->slab->memory().gpu) return not_shared(gpu_refused_->attempt, gpu_refused_->remedy);
    // The room may hold the input of a request whose result arrived before the GPU had read it.
    if (const Result<> free = events_->make_wait_for_answers(stream); !free) return free.error();
    if (const Result<> there = output.read_on(stream); !there) return there.error();
    if (output.bytes().empty()) return std::move(*copy);
    const cuda::Driver& driver = gpu()->driver();
    const cuda::Gpu::Current current{*gpu()};
    const cuda::CUresult queued = driver.cuMemcpyAsync(reinterpret_cast<cuda::CUdeviceptr>((*copy)->bytes().data()),
                                                       reinterpret_cast<cuda::CUdeviceptr>(output.bytes().data()),
                                                       output.bytes().size(), static_cast<cuda::CUstream>(stream));
    if (const Result<> done = driver.check("cuMemcpyAsync", queued); !done) return done.error();
    return std::move(*copy);
}

Result<> WorkerConnection::keep_outputs_on_gpu(std::uint64_t size_bytes) {
    const Result<bool> kept = until_done([&](bool& asked) { return keep_outputs_on_gpu_or_ask(size_bytes, asked); });
    return kept ? Result<>{} : Result<>{kept.error()};
}

Result<bool> WorkerConnection::keep_outputs_on_gpu_or_ask(std::uint64_t size_bytes, bool& asked) {
    if (const std::optional<wire::SlabKind> kind = gpu_kind())
        return grow_on_gpu_or_ask(wire::SlabDirection::output, size_bytes, *kind, asked);
    // Events that cannot be opened come before the slab that was asked for. It is returned once it
    // comes; a request sent before that would find its result in it.
    return growing() == nullptr;
}

/// Adds one slab; false while it is on its way. Failing to share it is not an error: `gpu_refused_`
/// then has the reason.
Result<bool> WorkerConnection::grow_on_gpu_or_ask(wire::SlabDirection direction, std::uint64_t size_bytes,
                                                  wire::SlabKind kind, bool& asked) {
    // A slab too late for an earlier call may still be on its way; a refusal that late is ignored.
    if (growing() != nullptr) return false;
    if (!std::exchange(asked, false)) {
        if (const Result<> sent = ask_for_slab(size_bytes, direction, kind); !sent) return sent.error();
        asked = true;
        return false;
    }
    std::optional<Error> refused = refusal_of(growth_);
    if (!refused) return ended_ ? Result<bool>{ended_->reason} : Result<bool>{true};
    if (refused->code != ErrorCode::not_permitted && refused->code != ErrorCode::internal) return *refused;
    if (!gpu_refused_) gpu_refused_ = std::move(refused);
    return true;
}

Result<> WorkerConnection::handle(channel::EventOffer&& offer, std::vector<UniqueFd>&&) {
    if (!events_ || (welcome_->features & gpu_features) == 0)
        return protocol_violation("an event_offer that was not agreed");
    Result<> taken = events_->take(offer);
    if (taken || taken.error().code == ErrorCode::protocol_violation) return taken;
    gpu_refused_ = taken.error();  // without events, memory cannot be exchanged in order
    return {};
}

/// Returns a slab that cannot be imported here; host memory replaces it. Until the worker has read
/// that, results may still lie in it: their requests fail. A slab that the worker added by itself
/// is returned when it is withdrawn, unless one was refused before.
Result<> WorkerConnection::refuse_slab(const channel::SlabOffer& offer, const Error& reason) {
    const bool is_output = offer.direction == wire::SlabDirection::output;
    if (is_output) slabs_.take(offer, SlabMemory::unusable(offer, reason), weak_from_this());
    if (offer.request_id == 0 && !gpu_refused_) return {};
    gpu_refused_ = reason;
    if (offer.request_id != 0) growth_ = std::monostate{};
    slabs_.returning(offer.slab_id);
    if (is_output) slabs_.returned(offer.size_bytes);
    returns_.push_back(offer.slab_id);
    flush_releases();
    return {};
}

/// Fails a request because an output lies where this process cannot read it, and returns its room
/// at once. A part whose parts were not asked for is dropped instead.
void WorkerConnection::lose_result(Requests::iterator request, const channel::InferResult& result, Error reason) {
    for (const channel::Tensor& tensor : result.tensors) give_back(tensor.lease);
    flush_releases();
    if (!result.more) return answer(request, std::move(reason));
    if (request->second.request.in_parts) spoil(request, std::move(reason));
}

/// Sets, in each GPU tensor of the message, one event behind the work that the caller has queued.
Result<> WorkerConnection::order_inputs(const Sending& request, channel::Infer& message) {
    std::uint32_t event = 0;
    for (std::size_t i = 0; i < request.inputs.size(); ++i) {
        const auto& lease = request.inputs[i].lease;
        if (!lease || !lease->slab->memory().gpu) continue;
        if (event == 0) {
            const Result<std::uint32_t> recorded = events_->record(request.stream);
            if (!recorded) return recorded.error();
            event = *recorded;
        }
        message.tensors[i].event_id = event;
    }
    return {};
}

}  // namespace bulkhead

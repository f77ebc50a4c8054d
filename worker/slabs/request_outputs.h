#pragma once

#include <memory>
#include <optional>

#include "ipc/channel/channel_codec.h"
#include "worker/model/model.h"
#include "worker/slabs/channel_slabs.h"

namespace bulkhead::worker {

/// The results of one request, leased from its channel's output slabs as the model announces them.
///
/// Owns    the leases until `hand_over`; the destructor takes back leases that no client got
/// Thread  the executor while the model runs, then the event loop
class RequestOutputs final : public OutputSink {
public:
    /// `inputs` are the request's. They outlive the model's run.
    RequestOutputs(std::shared_ptr<ChannelSlabs> slabs, Model& model, std::span<const channel::Tensor> inputs = {})
        : slabs_{std::move(slabs)}, kind_{slabs_->output_kind()}, model_{model}, inputs_{inputs} {}
    /// Places results in this kind, whatever the client asked for.
    RequestOutputs(std::shared_ptr<ChannelSlabs> slabs, Model& model, wire::SlabKind kind)
        : slabs_{std::move(slabs)}, kind_{kind}, model_{model} {}
    ~RequestOutputs() override;

    Result<std::span<std::byte>> allocate(std::string_view name, wire::DType dtype,
                                          std::span<const std::int64_t> dims) override;
    [[nodiscard]] bool on_device() const noexcept override { return kind_ != wire::SlabKind::host_memfd; }
    Result<> begin_on(void* stream) override;
    Result<> end_on(void* stream) override;

    [[nodiscard]] const channel::Tensors& tensors() const noexcept { return tensors_; }
    /// The client now has the leases; it returns them by `release`.
    void hand_over() noexcept { tensors_.clear(); }

private:
    std::shared_ptr<ChannelSlabs> slabs_;
    const wire::SlabKind kind_;             ///< fixed for this request, whatever the client
                                            ///< changes meanwhile
    std::optional<cuda::CUstream> stream_;  ///< set by `begin_on`
    Model& model_;
    std::span<const channel::Tensor> inputs_;
    channel::Tensors tensors_;
};

}  // namespace bulkhead::worker

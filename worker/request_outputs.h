#pragma once

#include <memory>
#include <vector>

#include "ipc/channel_codec.h"
#include "worker/channel_slabs.h"
#include "worker/model.h"

namespace bulkhead::worker {

/// The results of one request, leased from its channel's output slabs as the model announces them.
///
/// Owns    the leases until `hand_over`; the destructor takes back what no client was told of
/// Thread  the executor while the model runs, then the event loop
class RequestOutputs final : public OutputSink {
public:
    RequestOutputs(std::shared_ptr<ChannelSlabs> slabs, Model& model) : slabs_{std::move(slabs)}, model_{model} {}
    ~RequestOutputs() override { take_back(); }

    Result<std::span<std::byte>> allocate(std::string_view name, wire::DType dtype,
                                          std::span<const std::int64_t> dims) override;

    [[nodiscard]] const std::vector<channel::Tensor>& tensors() const noexcept { return tensors_; }
    /// The client has them now, and gives them back by `release`.
    void hand_over() noexcept { tensors_.clear(); }
    void take_back() noexcept;

private:
    std::shared_ptr<ChannelSlabs> slabs_;
    Model& model_;
    std::vector<channel::Tensor> tensors_;
};

}  // namespace bulkhead::worker

#include "worker/torch/warm_up.h"

#include <utility>

#include <ATen/ops/allclose.h>

namespace bulkhead::worker {
namespace {

bool same(const at::Tensor& left, const at::Tensor& right) {
    if (left.sizes() != right.sizes() || left.scalar_type() != right.scalar_type()) return false;
    if (!left.is_floating_point() && !left.is_complex()) return left.equal(right);
    const bool half = left.scalar_type() == at::kHalf || left.scalar_type() == at::kBFloat16;
    const double tolerance = half ? 2e-2 : 1e-3;
    return at::allclose(left, right, tolerance, tolerance, /*equal_nan=*/true);
}

std::vector<at::Tensor> copies(const std::vector<at::Tensor>& tensors) {
    std::vector<at::Tensor> result;
    for (const at::Tensor& tensor : tensors) result.push_back(tensor.detach().clone());
    return result;
}

}  // namespace

WarmedUp warm_up(const std::vector<at::Tensor>& inputs, int runs,
                 const std::function<std::vector<at::Tensor>()>& call) {
    const std::vector<at::Tensor> given = copies(inputs);
    WarmedUp warmed;
    for (int run = 0; run < runs; ++run) {
        warmed.before = std::exchange(warmed.last, {});
        warmed.last = copies(call());
        for (std::size_t i = 0; i < inputs.size(); ++i) inputs[i].copy_(given[i]);
    }
    return warmed;
}

std::optional<std::size_t> first_difference(const std::vector<at::Tensor>& left,
                                            const std::vector<at::Tensor>& right) {
    if (left.size() != right.size()) return 0;
    for (std::size_t i = 0; i < left.size(); ++i)
        if (!same(left[i], right[i])) return i;
    return std::nullopt;
}

}  // namespace bulkhead::worker

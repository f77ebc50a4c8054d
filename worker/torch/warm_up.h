#pragma once

#include <cstddef>
#include <functional>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

namespace bulkhead::worker {

/// Copies of the last two results of a repeated call. They are alike unless the method keeps state.
struct WarmedUp {
    std::vector<at::Tensor> before;  ///< empty after one call
    std::vector<at::Tensor> last;
};

/// Calls `runs` times, each time with `inputs` as given: `call` may write to them. They are
/// restored on return.
/// Throws what `call` throws
[[nodiscard]] WarmedUp warm_up(const std::vector<at::Tensor>& inputs, int runs,
                               const std::function<std::vector<at::Tensor>()>& call);

/// Returns the index of the first tensor that differs by more than kernels may (for example in the
/// order of atomic additions); 0 if the counts differ.
[[nodiscard]] std::optional<std::size_t> first_difference(const std::vector<at::Tensor>& left,
                                                          const std::vector<at::Tensor>& right);

}  // namespace bulkhead::worker

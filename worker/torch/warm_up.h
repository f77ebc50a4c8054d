#pragma once

#include <cstddef>
#include <functional>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

namespace bulkhead::worker {

/// Copies of the last two results of a method that is called again and again: alike, unless it keeps state.
struct WarmedUp {
    std::vector<at::Tensor> before;  ///< empty after one call
    std::vector<at::Tensor> last;
};

/// Calls `runs` times, each time with `inputs` as they were given: `call` may write into them. They are
/// restored when this returns.
/// Throws what `call` throws
[[nodiscard]] WarmedUp warm_up(const std::vector<at::Tensor>& inputs, int runs,
                               const std::function<std::vector<at::Tensor>()>& call);

/// The index of the first tensor that differs, by more than kernels of the same kind may, such as in the order of atomic
/// additions; 0 where their counts differ.
[[nodiscard]] std::optional<std::size_t> first_difference(const std::vector<at::Tensor>& left,
                                                          const std::vector<at::Tensor>& right);

}  // namespace bulkhead::worker

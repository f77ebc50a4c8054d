#pragma once

#include <memory>

#include "bulkhead/channel.h"
#include "bulkhead/third_party/dlpack/dlpack.h"
#include "ipc/base/error.h"

namespace bulkhead {

struct DLPackDeleter {
    void operator()(DLManagedTensorVersioned* tensor) const noexcept {
        if (tensor->deleter != nullptr) tensor->deleter(tensor);
    }
};
/// One tensor as PyTorch, NumPy, JAX, TVM and others exchange it. `release()` hands it to a consumer, who then calls
/// the deleter.
using DLPackTensor = std::unique_ptr<DLManagedTensorVersioned, DLPackDeleter>;

/// The output's bytes where they lie, without a copy. It holds the lease: the worker gets it back when the deleter has
/// run, on whichever thread the channel is used. Marked read-only; writing raises SIGSEGV. One on the GPU is of device
/// kDLCUDA: call `Output::read_on` first, with the stream on which the consumer reads it.
[[nodiscard]] DLPackTensor to_dlpack(Output output);

/// The input's bytes, to be filled by a library that speaks DLPack. It shares the lease, so the two may die in any
/// order. One on the GPU is of device kDLCUDA: the request's `stream` is that on which it was written.
[[nodiscard]] DLPackTensor to_dlpack(const Input& input);

/// For consumers from before DLPack 1.0, such as `at::fromDLPack`. That form cannot say that a tensor is read-only.
[[nodiscard]] DLManagedTensor* to_unversioned(DLPackTensor tensor);

/// The reverse. Null gives null.
[[nodiscard]] DLPackTensor from_unversioned(DLManagedTensor* tensor);

struct ImportedInput {
    Input input;
    bool copied;  ///< false: the tensor lies in an input of this channel already, and this is that input
    /// Of a copy within a GPU, which is queued on return: the tensor, to be kept until the stream has come so far.
    /// Memory of a library that orders its reuse by that very stream, as PyTorch does, may go at once. Else null.
    DLPackTensor source{};
};

/// Makes a tensor of any library an input of this channel. It is copied once, into a slab, by its strides, unless it is
/// what `to_dlpack(const Input&)` gave out, whole and under whatever owner: then nothing is copied. The tensor's
/// deleter has run on return, or runs with the last use of the input; or see `ImportedInput::source`.
///
/// One on the GPU that the channel shares is copied within it, into an input as `Channel::allocate_on_gpu` gives: by
/// the GPU, behind what is queued on `stream` (a CUstream; null: the default one), which must be the request's too.
///
/// Errors  input_invalid (neither in host memory, nor on that GPU, nor such an input; in too many pieces on the GPU;
/// another
///         major version of DLPack), dtype_unsupported, shape_mismatch, and those of `Channel::allocate`
[[nodiscard]] Result<ImportedInput> from_dlpack(Channel& channel, DLPackTensor tensor, void* stream = nullptr);

}  // namespace bulkhead

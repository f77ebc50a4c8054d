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
/// A tensor in the exchange format of PyTorch, NumPy, JAX, TVM and others. `release()` passes it to
/// a consumer, who then calls the deleter.
using DLPackTensor = std::unique_ptr<DLManagedTensorVersioned, DLPackDeleter>;

/// Exports the output's bytes in place, without a copy, and keeps its lease. The worker gets the
/// lease back after the deleter has run, on the thread that uses the channel. The tensor is
/// read-only: a write raises SIGSEGV. A GPU output has device kDLCUDA: first call `Output::read_on`
/// with the consumer's stream.
[[nodiscard]] DLPackTensor to_dlpack(Output output);

/// Exports the input's bytes for a library to fill. Tensor and input share the lease and may
/// die in any order. A GPU input has device kDLCUDA: set the request's `stream` to the stream
/// that wrote it.
[[nodiscard]] DLPackTensor to_dlpack(const Input& input);

/// Converts for consumers older than DLPack 1.0, such as `at::fromDLPack`. That form has no
/// read-only flag.
[[nodiscard]] DLManagedTensor* to_unversioned(DLPackTensor tensor);

/// Converts back. Null gives null.
[[nodiscard]] DLPackTensor from_unversioned(DLManagedTensor* tensor);

struct ImportedInput {
    Input input;
    bool copied;  ///< false: the tensor already is an input of this channel, and `input` shares it
    /// After a copy within a GPU, which is queued on return: the tensor; keep it until the stream
    /// has done the copy. Libraries that reuse memory in stream order, such as PyTorch, may drop it
    /// at once. Else null.
    DLPackTensor source{};
};

/// Makes a tensor of any library an input of this channel. Copies it once into a slab, honouring
/// its strides. A tensor that `to_dlpack(const Input&)` exported, and that is still whole, is not
/// copied, whatever owns it now. The deleter has run on return, or runs with the last use of the
/// input; or see `ImportedInput::source`.
///
/// A tensor on the GPU that the channel shares is copied there, into an input from
/// `Channel::allocate_on_gpu`. The copy is queued on `stream` (a CUstream; null: the default one);
/// use the same stream for the request.
///
/// Errors  input_invalid (neither in host memory, nor on that GPU, nor such an input; in too many
///         pieces on the GPU; another major version of DLPack), dtype_unsupported, shape_mismatch,
///         those of `Channel::allocate`
[[nodiscard]] Result<ImportedInput> from_dlpack(Channel& channel, DLPackTensor tensor, void* stream = nullptr);

}  // namespace bulkhead

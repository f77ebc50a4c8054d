#pragma once

#include <optional>
#include <span>

#include "bulkhead/dlpack.h"
#include "ipc/channel/tensor_layout.h"

namespace bulkhead {

/// Makes a tensor an input, in steps: the caller waits for room in between.
///
/// Owns    the tensor
/// Thread  the channel's
class DLPackImport {
public:
    /// `stream` as in `from_dlpack`. Errors  input_invalid, dtype_unsupported, shape_mismatch
    static Result<DLPackImport> of(DLPackTensor tensor, void* stream);

    [[nodiscard]] wire::DType dtype() const noexcept { return dtype_; }
    [[nodiscard]] std::span<const std::int64_t> dims() const noexcept {
        return {from().shape, static_cast<std::size_t>(from().ndim)};
    }
    [[nodiscard]] bool is_on_gpu() const noexcept { return from().device.device_type == kDLCUDA; }

    /// The input, of any channel, that the tensor already is.
    [[nodiscard]] std::optional<Input> exported() const;
    /// Checks, before room is allocated, that the tensor can be copied for a channel that shares
    /// `gpu`, or shares none because of `why_no_gpu`. Errors  input_invalid
    [[nodiscard]] Result<> can_be_copied(const cuda::Gpu* gpu, const std::optional<Error>& why_no_gpu) const;
    /// Copies the tensor into room of the same dtype and dims, on the GPU in stream order. `gpu` is
    /// the channel's shared GPU, where the tensor lies.
    /// Errors  those of `room`; input_invalid if the room is not on the GPU
    Result<ImportedInput> copied_into(Result<Input> room, const cuda::Gpu* gpu,
                                      const std::optional<Error>& why_no_gpu) &&;

private:
    DLPackImport(DLPackTensor tensor, wire::DType dtype, Dims strides, void* stream)
        : tensor_{std::move(tensor)}, dtype_{dtype}, strides_{std::move(strides)}, stream_{stream} {}
    [[nodiscard]] const DLTensor& from() const noexcept { return tensor_->dl_tensor; }
    [[nodiscard]] const std::byte* data() const noexcept {
        return static_cast<const std::byte*>(from().data) + from().byte_offset;
    }
    [[nodiscard]] Error not_on_gpu(const Error& reason) const;

    DLPackTensor tensor_;
    wire::DType dtype_;
    Dims strides_;
    void* stream_;
};

}  // namespace bulkhead

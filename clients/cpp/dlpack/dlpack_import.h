#pragma once

#include <memory>
#include <optional>
#include <span>

#include "bulkhead/dlpack.h"
#include "ipc/channel/tensor_layout.h"

namespace bulkhead {

/// A tensor that becomes an input, in steps: the caller waits for room in between.
///
/// Owns    the tensor
/// Thread  that of the channel
class DLPackImport {
public:
    /// `stream` as `from_dlpack`'s. Errors  input_invalid, dtype_unsupported, shape_mismatch
    static Result<DLPackImport> of(DLPackTensor tensor, void* stream);

    [[nodiscard]] wire::DType dtype() const noexcept { return dtype_; }
    [[nodiscard]] std::span<const std::int64_t> dims() const noexcept {
        return {from().shape, static_cast<std::size_t>(from().ndim)};
    }
    [[nodiscard]] bool is_on_gpu() const noexcept { return from().device.device_type == kDLCUDA; }

    /// The input that it is already, of whichever channel.
    [[nodiscard]] std::optional<Input> exported() const;
    /// Before room for a copy is allocated: whether there can be one, with a channel that shares `gpu`, or does not
    /// because of `why_no_gpu`. Errors  input_invalid
    [[nodiscard]] Result<> can_be_copied(const cuda::Gpu* gpu, const std::optional<Error>& why_no_gpu) const;
    /// Once, into room of the same dtype and dims; one on the GPU in the order of the stream. `gpu` is the one that the
    /// channel shares, where the tensor lies. Errors  those of the room; input_invalid: it is not on the GPU after all
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

#include "ipc/channel/tensor_layout.h"

#include <algorithm>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "ipc/channel/dtype.h"

namespace bulkhead {

Result<std::uint64_t> tensor_bytes(wire::DType dtype, std::span<const std::int64_t> dims) {
    const std::size_t size = element_size(dtype);
    if (size == 0)
        return Error{ErrorCode::dtype_unsupported, fmt::format("reading a tensor of dtype number {}", int(dtype)),
                     "send one of the dtypes that docs/channel.md lists"};
    if (dims.size() > wire::rank_max)
        return Error{ErrorCode::shape_mismatch, fmt::format("a tensor of {} dimensions", dims.size()),
                     fmt::format("send at most {} dimensions", wire::rank_max)};
    // The other dims of an empty tensor must be valid too, so zeros are multiplied in last.
    std::int64_t product = static_cast<std::int64_t>(size);
    bool empty = false;
    for (const std::int64_t dim : dims) {
        if (dim < 0)
            return Error{ErrorCode::shape_mismatch, fmt::format("shape [{}] has a negative dim", fmt::join(dims, ", ")),
                         "send dims of 0 or more"};
        if (dim == 0)
            empty = true;
        else if (__builtin_mul_overflow(product, dim, &product))
            return Error{ErrorCode::shape_mismatch,
                         fmt::format("shape [{}] of {} exceeds 2^63 bytes", fmt::join(dims, ", "), to_string(dtype)),
                         "send a smaller tensor"};
    }
    return empty ? std::uint64_t{0} : static_cast<std::uint64_t>(product);
}

Dims contiguous_strides(std::span<const std::int64_t> dims) {
    Dims strides(dims.size(), 1);
    for (std::size_t i = dims.size(); i > 1; --i) {
        const std::int64_t dim = dims[i - 1] == 0 ? 1 : dims[i - 1];
        strides[i - 2] = strides[i - 1] * dim;
    }
    return strides;
}

bool is_contiguous(std::span<const std::int64_t> dims, std::span<const std::int64_t> strides) {
    if (dims.size() != strides.size()) return false;
    if (std::ranges::find(dims, 0) != dims.end()) return true;
    const Dims expected = contiguous_strides(dims);
    for (std::size_t i = 0; i < dims.size(); ++i)
        if (dims[i] != 1 && strides[i] != expected[i]) return false;
    return true;
}

Result<> check_placement(const wire::LeaseRef& lease, std::uint64_t slab_size_bytes) {
    const bool inside =
        lease.offset_bytes <= slab_size_bytes && lease.size_bytes <= slab_size_bytes - lease.offset_bytes;
    if (inside && lease.offset_bytes % wire::tensor_alignment == 0) return {};
    return Error{ErrorCode::protocol_violation,
                 fmt::format("{} bytes at offset {} of slab {}, which has {} bytes", lease.size_bytes,
                             lease.offset_bytes, lease.slab_id, slab_size_bytes),
                 fmt::format("place tensors inside the slab, at multiples of {}", wire::tensor_alignment)};
}

}  // namespace bulkhead

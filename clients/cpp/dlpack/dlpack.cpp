#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <utility>

#include <fmt/format.h>

#include "bulkhead/dlpack.h"
#include "clients/cpp/base/limits.h"
#include "clients/cpp/dlpack/dlpack_import.h"
#include "ipc/channel/dtype.h"
#include "ipc/channel/tensor_layout.h"
#include "ipc/cuda/gpu.h"

namespace bulkhead {
namespace {

/// Returns the DLDataTypeCode of a kind.
std::uint8_t code_of(char kind) {
    switch (kind) {
    case 'b': return kDLBool;
    case 'u': return kDLUInt;
    case 'i': return kDLInt;
    case 'c': return kDLComplex;
    default: return kind == 'B' ? kDLBfloat : kDLFloat;
    }
}

std::optional<wire::DType> dtype_of(const DLDataType& type) {
    if (type.lanes != 1) return std::nullopt;
    return find_dtype(
        [&](const DTypeFacts& one) { return code_of(one.kind) == type.code && 8 * one.size == type.bits; });
}

/// Currently exported inputs, by their first byte: one that comes back needs no copy.
class ExportedInputs {
public:
    void add(const std::byte* data, const Input& input) {
        const std::lock_guard lock{mutex_};
        exports_.emplace(data, input.share());
    }
    void remove(const std::byte* data) {
        decltype(exports_)::node_type removed;  // may return the lease, after the lock is released
        const std::lock_guard lock{mutex_};
        removed = exports_.extract(exports_.find(data));
    }
    std::optional<Input> find(const std::byte* data) {
        const std::lock_guard lock{mutex_};
        const auto found = exports_.find(data);
        if (found == exports_.end()) return std::nullopt;
        return found->second.share();
    }

private:
    std::mutex mutex_;
    std::multimap<const std::byte*, Input> exports_;  ///< an input for each time that it was exported
};

/// Never destroyed: a library may release a tensor while the program ends.
ExportedInputs& exported_inputs() {
    static ExportedInputs& only = *new ExportedInputs;
    return only;
}

class ExportedInput {
public:
    explicit ExportedInput(Input input) : input_{std::move(input)}, data_{input_.bytes().data()} {
        exported_inputs().add(data_, input_);
    }
    ~ExportedInput() { exported_inputs().remove(data_); }
    ExportedInput(const ExportedInput&) = delete;
    ExportedInput& operator=(const ExportedInput&) = delete;

private:
    Input input_;
    const std::byte* data_;
};

/// What `manager_ctx` points to; `Owner` holds the lease.
template <typename Owner>
struct Exported {
    template <typename... Arguments>
    Exported(wire::DType dtype, std::span<const std::int64_t> dims, std::span<const std::byte> bytes,
             std::optional<int> gpu, std::uint64_t flags, Arguments&&... arguments)
        : owner(std::forward<Arguments>(arguments)...) {
        const Dims contiguous = contiguous_strides(dims);
        std::ranges::copy(dims, shape.begin());
        std::ranges::copy(contiguous, strides.begin());
        tensor.version = {DLPACK_MAJOR_VERSION, DLPACK_MINOR_VERSION};
        tensor.manager_ctx = this;
        tensor.deleter = [](DLManagedTensorVersioned* self) { delete static_cast<Exported*>(self->manager_ctx); };
        tensor.flags = flags;
        tensor.dl_tensor = {
            .data = bytes.empty() ? nullptr : const_cast<std::byte*>(bytes.data()),
            .device = gpu ? DLDevice{kDLCUDA, *gpu} : DLDevice{kDLCPU, 0},
            .ndim = static_cast<std::int32_t>(dims.size()),
            .dtype = {code_of(facts_of(dtype).kind), static_cast<std::uint8_t>(8 * element_size(dtype)), 1},
            .shape = shape.data(),
            .strides = strides.data(),
            .byte_offset = 0};
    }

    Owner owner;
    std::array<std::int64_t, wire::rank_max> shape{};
    std::array<std::int64_t, wire::rank_max> strides{};
    DLManagedTensorVersioned tensor{};
};

/// Wraps one form of tensor in the other form.
template <typename Outer, typename Inner>
struct Wrapped {
    Inner* inner;
    Outer outer{};

    static Outer* make(Inner* inner) {
        auto* wrapped = new Wrapped{inner};
        wrapped->outer.dl_tensor = inner->dl_tensor;
        wrapped->outer.manager_ctx = wrapped;
        wrapped->outer.deleter = [](Outer* self) {
            auto* whole = static_cast<Wrapped*>(self->manager_ctx);
            if (whole->inner->deleter != nullptr) whole->inner->deleter(whole->inner);
            delete whole;
        };
        return &wrapped->outer;
    }
};

/// A strided tensor, split into the longest contiguous pieces of its last dimensions.
struct Pieces {
    std::span<const std::int64_t> dims;
    std::span<const std::int64_t> strides;
    std::int64_t element;  ///< bytes
    std::size_t outer;     ///< number of dimensions iterated over
    std::int64_t run = 1;  ///< contiguous elements of the remaining dimensions

    Pieces(std::span<const std::int64_t> shape, std::span<const std::int64_t> steps, std::size_t element_bytes)
        : dims{shape}, strides{steps}, element{static_cast<std::int64_t>(element_bytes)}, outer{shape.size()} {
        while (outer > 0 && (dims[outer - 1] == 1 || strides[outer - 1] == run)) run *= dims[--outer];
    }
    /// Whether there are at most `most` pieces. The tensor must not be empty.
    [[nodiscard]] bool are_no_more_than(std::int64_t most) const {
        for (const std::int64_t dim : dims.first(outer)) most /= dim;
        return most > 0;
    }
    /// Calls `copy(target, source, bytes)` for each piece, in the order of a contiguous `target`,
    /// while it returns true; returns whether it always did. Leaves `target` behind the last piece.
    /// The tensor must not be empty. `d`: the dimension to iterate over.
    template <typename Copy>
    bool each(std::byte*& target, const std::byte* source, const Copy& copy, std::size_t d = 0) const {
        if (d == outer)
            return copy(std::exchange(target, target + run * element), source, static_cast<std::size_t>(run * element));
        for (std::int64_t i = 0; i < dims[d]; ++i, source += strides[d] * element)
            if (!each(target, source, copy, d + 1)) return false;
        return true;
    }
};

Error refused(ErrorCode code, std::string what, std::string remedy) {
    return {code, "importing a DLPack tensor: " + std::move(what), std::move(remedy)};
}

bool is_empty(std::span<const std::int64_t> dims) { return std::ranges::find(dims, 0) != dims.end(); }

Result<> copy_on_gpu(const cuda::Gpu& gpu, const Pieces& pieces, std::byte* target, const std::byte* data,
                     void* stream) {
    cuda::CUresult queued = cuda::CUDA_SUCCESS;
    const cuda::Gpu::Current current{gpu};
    const bool done = pieces.each(target, data, [&](std::byte* to, const std::byte* from, std::size_t bytes) {
        queued = gpu.driver().cuMemcpyAsync(reinterpret_cast<cuda::CUdeviceptr>(to),
                                            reinterpret_cast<cuda::CUdeviceptr>(from), bytes,
                                            static_cast<cuda::CUstream>(stream));
        return queued == cuda::CUDA_SUCCESS;
    });
    if (done) return {};
    gpu.synchronize();  // queued copies then no longer use input or tensor
    return gpu.driver().failed("cuMemcpyAsync", queued).during("importing a DLPack tensor");
}

}  // namespace

DLPackTensor to_dlpack(Output output) {
    // A moved Output keeps its lease in place, so these views stay valid.
    const auto dims = output.dims();
    const auto bytes = output.bytes();
    const wire::DType dtype = output.dtype();
    const std::optional<int> gpu = output.gpu();
    auto* made = new Exported<Output>{dtype, dims, bytes, gpu, DLPACK_FLAG_BITMASK_READ_ONLY, std::move(output)};
    return DLPackTensor{&made->tensor};
}

DLPackTensor to_dlpack(const Input& input) {
    Input shared = input.share();
    const auto bytes = shared.bytes();
    auto* made = new Exported<ExportedInput>{input.dtype(), input.dims(), bytes, input.gpu(), 0, std::move(shared)};
    return DLPackTensor{&made->tensor};
}

DLManagedTensor* to_unversioned(DLPackTensor tensor) {
    return Wrapped<DLManagedTensor, DLManagedTensorVersioned>::make(tensor.release());
}

DLPackTensor from_unversioned(DLManagedTensor* tensor) {
    if (tensor == nullptr) return {};
    DLPackTensor made{Wrapped<DLManagedTensorVersioned, DLManagedTensor>::make(tensor)};
    made->version = {DLPACK_MAJOR_VERSION, DLPACK_MINOR_VERSION};
    return made;
}

Result<DLPackImport> DLPackImport::of(DLPackTensor tensor, void* stream) {
    if (tensor == nullptr)
        return refused(ErrorCode::input_invalid, "there is none", "pass one that no consumer has taken");
    if (tensor->version.major != DLPACK_MAJOR_VERSION)  // no other member may be read
        return refused(ErrorCode::input_invalid, fmt::format("it is of version {}", tensor->version.major),
                       fmt::format("export it as version {}", DLPACK_MAJOR_VERSION));
    const DLTensor& from = tensor->dl_tensor;
    const std::optional<wire::DType> dtype = dtype_of(from.dtype);
    if (!dtype)
        return refused(
            ErrorCode::dtype_unsupported,
            fmt::format("its type has code {}, {} bits, {} lanes", from.dtype.code, from.dtype.bits, from.dtype.lanes),
            "convert it to a type of docs/channel.md");
    if (from.ndim < 0 || from.ndim > static_cast<std::int32_t>(wire::rank_max))
        return refused(ErrorCode::shape_mismatch, fmt::format("it has {} dimensions", from.ndim),
                       fmt::format("use at most {}", wire::rank_max));
    const std::span<const std::int64_t> dims{from.shape, static_cast<std::size_t>(from.ndim)};
    const Result<std::uint64_t> bytes = tensor_bytes(*dtype, dims);
    if (!bytes) return Error{bytes.error()}.during("importing a DLPack tensor");
    // Before DLPack 1.2, null meant contiguous.
    Dims strides = from.strides == nullptr ? contiguous_strides(dims) : Dims(from.strides, from.strides + from.ndim);
    return DLPackImport{std::move(tensor), *dtype, std::move(strides), stream};
}

std::optional<Input> DLPackImport::exported() const {
    if (!is_contiguous(dims(), strides_)) return std::nullopt;
    std::optional<Input> input = exported_inputs().find(data());
    if (input && (input->dtype() != dtype_ || !std::ranges::equal(input->dims(), dims()))) input.reset();
    return input;
}

Error DLPackImport::not_on_gpu(const Error& reason) const {
    return refused(ErrorCode::input_invalid,
                   fmt::format("it lies on GPU {}; {}", from().device.device_id, reason.attempt),
                   reason.remedy + "; or copy it to the host first");
}

Result<> DLPackImport::can_be_copied(const cuda::Gpu* gpu, const std::optional<Error>& why_no_gpu) const {
    const auto [device, number] = from().device;
    if (device == kDLCPU || device == kDLCUDAHost) return {};
    if (device != kDLCUDA)
        return refused(ErrorCode::input_invalid,
                       fmt::format("it lies on device {}:{}", static_cast<int>(device), number),
                       "copy it to the host first");
    if (why_no_gpu) return not_on_gpu(*why_no_gpu);
    if (gpu->device() != number)
        return refused(ErrorCode::input_invalid,
                       fmt::format("it lies on GPU {}, and the channel shares GPU {}", number, gpu->device()),
                       "move it there, or copy it to the host first");
    const Pieces pieces{dims(), strides_, element_size(dtype_)};
    if (!is_empty(dims()) && !pieces.are_no_more_than(limits::gpu_pieces_max))
        return refused(ErrorCode::input_invalid,
                       fmt::format("on its GPU it lies in more than {} pieces", limits::gpu_pieces_max),
                       "make it contiguous first");
    return {};
}

Result<ImportedInput> DLPackImport::copied_into(Result<Input> room, const cuda::Gpu* gpu,
                                                const std::optional<Error>& why_no_gpu) && {
    if (!room) return Error{room.error()}.during("importing a DLPack tensor");
    if (is_on_gpu() && !room->gpu()) return not_on_gpu(why_no_gpu.value());
    if (!is_empty(dims())) {
        const Pieces pieces{dims(), strides_, element_size(dtype_)};
        std::byte* target = room->bytes().data();
        if (is_on_gpu()) {
            if (const Result<> queued = copy_on_gpu(*gpu, pieces, target, data(), stream_); !queued)
                return queued.error();
        } else {
            pieces.each(target, data(), [](std::byte* to, const std::byte* from, std::size_t bytes) {
                std::memcpy(to, from, bytes);
                return true;
            });
        }
    }
    return ImportedInput{std::move(*room), true, is_on_gpu() ? std::move(tensor_) : nullptr};
}

Result<ImportedInput> from_dlpack(Channel& channel, DLPackTensor tensor, void* stream) {
    Result<DLPackImport> import = DLPackImport::of(std::move(tensor), stream);
    if (!import) return std::move(import).error();
    if (std::optional<Input> ours = import->exported(); ours && channel.owns(*ours))
        return ImportedInput{std::move(*ours), false};
    const std::shared_ptr<const cuda::Gpu> gpu = channel.gpu();
    if (Result<> possible = import->can_be_copied(gpu.get(), channel.why_no_gpu()); !possible)
        return std::move(possible).error();
    Result<Input> room = import->is_on_gpu() ? channel.allocate_on_gpu(import->dtype(), import->dims())
                                             : channel.allocate(import->dtype(), import->dims());
    return std::move(*import).copied_into(std::move(room), gpu.get(), channel.why_no_gpu());
}

}  // namespace bulkhead

#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <boost/container/small_vector.hpp>
#include <boost/json.hpp>

#include "bulkhead/control.h"
#include "ipc/base/error.h"
#include "ipc/channel/wire.h"

namespace bulkhead {

namespace cuda {
class Gpu;  // ipc/cuda/gpu.h
}

class ReconnectingChannel;  // connections with one worker after another
class WorkerConnection;     // one connection: the socket, and the tables of slabs and requests
class ClientSlabs;          // the slabs of one connection

/// Bytes in the input slab, leased by this client. Allocate, fill, submit; nothing is copied.
///
/// Owns    its lease; the destructor returns it once no request in flight uses it. The bytes stay
///         valid if the channel ends first
/// Thread  its channel's
class Input {
public:
    Input(Input&&) noexcept = default;
    Input& operator=(Input&&) noexcept = default;

    [[nodiscard]] std::span<std::byte> bytes() noexcept;
    template <typename T>
    [[nodiscard]] std::span<T> as() noexcept {
        return {reinterpret_cast<T*>(bytes().data()), bytes().size() / sizeof(T)};
    }
    [[nodiscard]] wire::DType dtype() const noexcept;
    [[nodiscard]] std::span<const std::int64_t> dims() const noexcept;
    /// The ordinal, in this process, of the GPU that holds the bytes; nothing for host memory.
    /// `bytes` are then device addresses, which the host must not read or write.
    [[nodiscard]] std::optional<int> gpu() const noexcept;
    /// Returns another handle on the same lease. The last handle returns the lease.
    [[nodiscard]] Input share() const { return Input{lease_}; }

private:
    friend class Channel;
    friend class ReconnectingChannel;
    friend class WorkerConnection;
    friend class ClientSlabs;
    struct Lease;
    explicit Input(std::shared_ptr<Lease> lease) : lease_{std::move(lease)} {}
    std::shared_ptr<Lease> lease_;
};

/// One result tensor, a read-only view of the worker's output slab.
///
/// Owns    its lease; the destructor returns it to the worker once no request in flight forwards
///         it. The bytes stay readable after the worker has died; the unload receipt then names
///         this client as holding them
class Output {
public:
    Output(Output&&) noexcept = default;
    Output& operator=(Output&&) noexcept = default;

    [[nodiscard]] std::string_view name() const noexcept;
    [[nodiscard]] wire::DType dtype() const noexcept;
    [[nodiscard]] std::span<const std::int64_t> dims() const noexcept;
    [[nodiscard]] std::span<const std::byte> bytes() const noexcept;
    template <typename T>
    [[nodiscard]] std::span<const T> as() const noexcept {
        return {reinterpret_cast<const T*>(bytes().data()), bytes().size() / sizeof(T)};
    }

    /// As `Input::gpu`.
    [[nodiscard]] std::optional<int> gpu() const noexcept;
    /// A GPU output may arrive before it is computed. Work queued on `stream` (a CUstream; null:
    /// the default one) after this call runs once the output is ready. When the output is dropped,
    /// the worker reuses the bytes only after all work queued by then on every stream this was
    /// called with: destroy none of these streams before. No effect for host memory.
    [[nodiscard]] Result<> read_on(void* stream);

private:
    friend class ReconnectingChannel;
    friend class WorkerConnection;
    struct Lease;
    explicit Output(std::shared_ptr<Lease> lease) : lease_{std::move(lease)} {}
    std::shared_ptr<Lease> lease_;  ///< shared with the requests that forward it
};

struct Reply {
    boost::container::small_vector<Output, 8> outputs;  ///< more than 8 go to the heap
    std::chrono::microseconds queued{};                 ///< in the worker, before it started
    std::chrono::microseconds run{};                    ///< in the model
    boost::json::object values;                         ///< results that are not
                                                        ///< tensors; usually empty
    bool more = false;                                  ///< further parts of this answer follow
    [[nodiscard]] const Output* find(std::string_view name) const noexcept;
};

/// An input allocated on this channel, or an output of any channel. The worker borrows the output's
/// slab once and reads the output in place; if it cannot, it gets a copy. A GPU output is copied on
/// the GPU, in the order of `Request::stream`, as if `read_on` were called with it, and only to a
/// channel that shares this GPU: else `input_invalid`.
/// Thread  channels that forward outputs to one another must all be used by one thread at a time
struct NamedInput {
    NamedInput(std::string_view named, const Input* tensor) : name{named}, input{tensor} {}
    NamedInput(std::string_view named, const Output* tensor) : name{named}, output{tensor} {}
    std::string_view name;
    const Input* input = nullptr;
    const Output* output = nullptr;
};

struct Request {
    std::string_view method = "forward";
    std::span<const NamedInput> inputs{};
    boost::json::object parameters{};
    std::chrono::milliseconds deadline{0};  ///< 0: the model's own
    /// Running the request twice does no harm. If the worker dies before it answers, the request is
    /// sent once more, to the next worker. Loading that worker counts against the deadline.
    bool retry_safe = false;
    /// The model may answer in parts, for example one per token; read them with `Channel::next`. If
    /// false, parts are dropped and the last one is the answer. After its first part a request is
    /// not sent again.
    bool in_parts = false;
    /// The stream (a CUstream; null: the default one) that wrote the GPU inputs. The worker reads
    /// them after the work queued on it now. Before you write such an input again, queue behind
    /// `Output::read_on` of a GPU result. Do the same before you write an input allocated since, or
    /// the copy of a forwarded output: it may reuse the same room. A request with GPU inputs is
    /// never sent again, because its inputs die with the worker.
    void* stream = nullptr;
};

struct ChannelOptions {
    std::string client = "bulkhead-cpp";                ///< at most 47 bytes, for logs and receipts
    std::optional<std::chrono::milliseconds> deadline;  ///< for opening, including a load
    /// Ask for rings in shared memory, which wake faster than the socket. BULKHEAD_RINGS=0
    /// disables them.
    bool rings = true;
    std::chrono::microseconds spin{0};  ///< ignored; kept for programs that set it
    /// An added input slab is returned after being empty for this long: by an `AsyncChannel` on its
    /// own, by a `Channel` at the next request or `receive`.
    std::chrono::milliseconds slab_idle{30'000};
    /// The GPU to share tensors on, if it is the worker's; see `cuda::Gpu::open`.
    std::shared_ptr<const cuda::Gpu> gpu{};
    /// Preferred kind if the worker supports both: cuda_vmm, or the older cuda_ipc.
    wire::SlabKind gpu_kind = wire::SlabKind::cuda_vmm;
};

/// A direct connection to one worker. The supervisor only introduces the two; it may die meanwhile.
///
/// If the worker dies, the channel and its requests fail with `worker_lost` until `reopen`, or a
/// retry-safe request, connects to the next worker. Retry-safe requests are sent once more, all
/// together; their inputs are copied from the old slab, which stays mapped here. Not sent again:
/// requests of a stateful model, cancelled or answered ones, those that an unload ended, and any on
/// an adopted channel. Inputs and outputs in the dead worker's slabs stay usable; such an input is
/// copied each time it is sent.
///
/// Thread  one at a time; different channels may run on different threads
class Channel {
public:
    /// Loads the model if need be.
    /// Errors  as `channel.open`, and `busy` for a stateful model in use
    static Result<Channel> open(ControlClient& control, std::string_view model, const ChannelOptions& options = {});

    /// Opens a channel on a descriptor from another source. It ends with its worker, because it
    /// knows no daemon to ask for the next one.
    static Result<Channel> adopt(UniqueFd socket, const ChannelOptions& options = {});

    Channel(Channel&&) noexcept;
    Channel& operator=(Channel&&) noexcept;
    ~Channel();

    /// Describes the methods: `{"forward": {"inputs": [{"name","dtype","shape"}], "parameters":
    /// […], "outputs": […]}}`. This and the values below describe the current worker; references
    /// are valid until the channel is reopened.
    [[nodiscard]] const boost::json::object& methods() const noexcept;
    [[nodiscard]] std::string_view model() const noexcept;
    [[nodiscard]] std::uint64_t generation() const noexcept;
    [[nodiscard]] std::uint32_t replica() const noexcept;

    /// Opens the channel again, as `open` did, if its worker died or was unloaded; else does
    /// nothing. A stateful model starts over. Errors  as `open`; worker_lost for an adopted channel
    [[nodiscard]] Result<> reopen(std::optional<std::chrono::milliseconds> deadline = {});
    /// Number of requests sent once more.
    [[nodiscard]] std::uint64_t replays() const noexcept;

    /// Leases room for one tensor in the input slab; adds a slab if the channel's slabs are full.
    /// Errors  resources_exhausted naming the channel's bound, shape_mismatch (negative, overflow)
    [[nodiscard]] Result<Input> allocate(wire::DType dtype, std::span<const std::int64_t> dims);

    /// Allocates in memory of the GPU that worker and client share. If they share none, or this
    /// process cannot import it (another container), the input lies in host memory; `Input::gpu`
    /// tells, `why_no_gpu` gives the reason.
    /// Errors  as `allocate`; out_of_memory of the GPU
    [[nodiscard]] Result<Input> allocate_on_gpu(wire::DType dtype, std::span<const std::int64_t> dims);
    /// Places later results on the GPU, in a slab of at least `size_bytes` at first. Does nothing
    /// if `why_no_gpu` has a reason. Errors  as `allocate_on_gpu`
    [[nodiscard]] Result<> keep_outputs_on_gpu(std::uint64_t size_bytes);
    /// Why this channel cannot place tensors on a GPU; empty if it can.
    [[nodiscard]] std::optional<Error> why_no_gpu() const;

    /// The GPU from the options; may be null.
    [[nodiscard]] std::shared_ptr<const cuda::Gpu> gpu() const noexcept;

    /// Whether the input was allocated on this channel, in a slab of any of its workers.
    [[nodiscard]] bool owns(const Input& input) const noexcept;

    /// `submit` and `wait` in one. Errors  the worker's own; worker_lost when it died
    [[nodiscard]] Result<Reply> infer(const Request& request);

    /// Sends a request and returns its number. The worker's welcome limits how many may be in
    /// flight; an answered request counts until `wait` returns it.
    /// Errors  queue_full (first wait for an earlier one), the code of the worker's `closing`,
    ///         worker_lost, input_invalid for another channel's input
    [[nodiscard]] Result<std::uint64_t> submit(const Request& request);
    /// Waits for the answer, until the request's deadline at most (`deadline_exceeded`). Returns an
    /// answer that arrived before the worker died. Sends a lost retry-safe request once more. If
    /// that fails, the error says why; it is `worker_lost` if the next worker died of the request
    /// too.
    [[nodiscard]] Result<Reply> wait(std::uint64_t request_id);
    /// Returns the next part of an `in_parts` request, waiting as `wait` does. A part without
    /// `more` is the last and ends the request. Returns parts that have arrived before it
    /// reports an error.
    /// Errors  as `wait`; worker_lost tells how many tokens or parts had come; resources_exhausted
    ///         if thousands were not taken
    [[nodiscard]] Result<Reply> next(std::uint64_t request_id);
    /// Cancels the request. It ends with `cancelled` unless it has finished.
    [[nodiscard]] Result<> cancel(std::uint64_t request_id);
    /// Cancels the request and drops the rest of its answer. Do not wait for it afterwards.
    void abandon(std::uint64_t request_id);

    /// Readable when an answer has arrived or the channel has ended. Only poll it. Changes when the
    /// channel is reopened.
    [[nodiscard]] int fd();
    /// Handles the worker's messages and returns unused slabs and leases. Never blocks. While no
    /// request is awaited, call it when `fd` is readable, so that the worker can reclaim memory,
    /// and now and then, so that idle slabs (`slab_idle`) return. Errors  why the channel has ended
    Result<> receive();

private:
    explicit Channel(std::unique_ptr<ReconnectingChannel> channel);
    std::unique_ptr<ReconnectingChannel> channel_;
};

}  // namespace bulkhead

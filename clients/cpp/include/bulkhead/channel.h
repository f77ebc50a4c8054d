#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
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

class ReconnectingChannel;  // sessions with one worker after another
class WorkerSession;        // one of them: the socket, and the tables of slabs and requests
class ClientSlabs;          // the slabs of one session

/// Bytes in the input slab, leased by this client: allocate, then fill, then submit. Nothing is copied.
///
/// Owns    its lease, given back by the destructor once no request that uses it is in flight; the bytes
///         stay valid when the channel ends first
/// Thread  that of its channel
class Input {
public:
    Input(Input&&) noexcept;
    Input& operator=(Input&&) noexcept;
    ~Input();

    [[nodiscard]] std::span<std::byte> bytes() noexcept;
    template <typename T>
    [[nodiscard]] std::span<T> as() noexcept {
        return {reinterpret_cast<T*>(bytes().data()), bytes().size() / sizeof(T)};
    }
    [[nodiscard]] wire::DType dtype() const noexcept;
    [[nodiscard]] std::span<const std::int64_t> dims() const noexcept;
    /// The GPU in whose memory the bytes lie: its ordinal in this process. The bytes are then addresses that only the
    /// GPU reads and writes. Nothing for host memory.
    [[nodiscard]] std::optional<int> gpu() const noexcept;
    /// Another handle on the same lease. The last handle gives the lease back.
    [[nodiscard]] Input share() const { return Input{lease_}; }

private:
    friend class Channel;
    friend class ReconnectingChannel;
    friend class WorkerSession;
    friend class ClientSlabs;
    struct Lease;
    explicit Input(std::shared_ptr<Lease> lease);
    std::shared_ptr<Lease> lease_;
};

/// One result tensor, a read-only view of the worker's output slab.
///
/// Owns    its lease: the destructor gives it back to the worker, once no request that forwards it is in flight. The
///         bytes stay readable after the worker has died; holding them keeps that memory from returning, and the
///         receipt says so.
class Output {
public:
    Output(Output&&) noexcept;
    Output& operator=(Output&&) noexcept;
    ~Output();

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
    /// An output on the GPU may arrive before it is computed. What is queued on `stream` (a CUstream; null: the default
    /// one) after this call runs when it is there; when this output is dropped, the worker takes the bytes back behind
    /// all that is queued on that stream by then, and on others that this was called with. Does nothing for one in host
    /// memory.
    [[nodiscard]] Result<> read_on(void* stream);

private:
    friend class ReconnectingChannel;
    friend class WorkerSession;
    struct Lease;
    explicit Output(std::shared_ptr<Lease> lease);
    std::shared_ptr<Lease> lease_;  ///< shared with the requests that forward it
};

struct Reply {
    boost::container::small_vector<Output, 8> outputs;  ///< more than these take the heap
    std::chrono::microseconds queued{};                 ///< in the worker, before it started
    std::chrono::microseconds run{};                    ///< in the model
    boost::json::object values;                         ///< results that are not tensors; usually empty
    bool more = false;                                  ///< further parts of this answer follow
    [[nodiscard]] const Output* find(std::string_view name) const noexcept;
};

/// An input allocated on the channel, or an output of any channel. The worker reads an output where it lies: it borrows
/// the output's slab once, and gets a copy only where it cannot. An output on the GPU is copied there, in the order of
/// `Request::stream`, and only to a channel that shares this GPU: else `input_invalid`. Thread  channels whose outputs
/// are forwarded to one another are used by one thread at a time, all together
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
    /// Running it twice does no harm. If the worker dies before it answers, the request is sent once more, to the next
    /// worker. Loading that worker counts against the deadline.
    bool retry_safe = false;
    /// The model may answer in parts, for example a token each: `Channel::next` returns them. Otherwise parts are
    /// dropped, and the last is the answer. A request that has a part is not sent once more.
    bool in_parts = false;
    /// The stream (a CUstream; null: the default one) on which inputs on the GPU were written: the worker reads them
    /// behind what is queued on it now. What writes such an input again must be queued behind `Output::read_on` of the
    /// result, where that lies on the GPU; so must what writes an input that was allocated since, whose room may have
    /// been the same, or that of a forwarded output's copy. Such a request is never sent once more: its inputs end with
    /// the worker.
    void* stream = nullptr;
};

struct ChannelOptions {
    std::string client = "bulkhead-cpp";                ///< at most 47 bytes, for logs and receipts
    std::optional<std::chrono::milliseconds> deadline;  ///< of opening, a load included
    /// Ask for rings in shared memory: cheaper wake-ups than the socket's. BULKHEAD_RINGS=0 in the environment: never.
    bool rings = true;
    std::chrono::microseconds spin{0};  ///< ignored, for programs that set it
    /// An added input slab that was empty for so long is given back: by an `AsyncChannel` itself, by a `Channel` with
    /// the next request or `receive`.
    std::chrono::milliseconds slab_idle{30'000};
    /// The GPU on which to share tensors, if it is the worker's; see `cuda::Gpu::open`.
    std::shared_ptr<const cuda::Gpu> gpu{};
    /// How to share them where the worker can do both: cuda_vmm, or the older cuda_ipc.
    wire::SlabKind gpu_kind = wire::SlabKind::cuda_vmm;
};

/// A direct connection to one worker. The supervisor introduces the two and then takes no part: it may die meanwhile.
///
/// When the worker dies, requests fail with `worker_lost`, and so does the channel, until `reopen`, or a retry-safe
/// request, has connected to the next worker. Those are sent once more: inputs are copied from the old slab, which
/// stays mapped here, and all that were lost go out together. Never sent again are requests of a model with state,
/// cancelled ones, those whose answer had come, and those that an unload ended; nor any on an adopted channel.
/// Inputs and outputs of the dead worker's slabs stay usable: such an input is copied each time it is sent.
///
/// Thread  one at a time; several channels may be used from several threads
class Channel {
public:
    /// Loads the model if need be. Errors  as `channel.open`, and `busy` for a stateful model in use
    static Result<Channel> open(ControlClient& control, std::string_view model, const ChannelOptions& options = {});

    /// Opens a channel on a descriptor that came from elsewhere. It ends with its worker, because it does not know
    /// which daemon to ask for the next one.
    static Result<Channel> adopt(UniqueFd socket, const ChannelOptions& options = {});

    Channel(Channel&&) noexcept;
    Channel& operator=(Channel&&) noexcept;
    ~Channel();

    /// The methods as the worker describes them: `{"forward": {"inputs": [{"name","dtype","shape"}],
    /// "parameters": […], "outputs": […]}}`. These values, and those below, are the present worker's: a reference is
    /// valid until the channel is reopened.
    [[nodiscard]] const boost::json::object& methods() const noexcept;
    [[nodiscard]] std::string_view model() const noexcept;
    [[nodiscard]] std::uint64_t generation() const noexcept;
    [[nodiscard]] std::uint32_t replica() const noexcept;

    /// Opens the channel again when its worker has died or was unloaded, as `open` did; else does nothing. A model with
    /// state starts over. Errors  as `open`; worker_lost for an adopted channel
    [[nodiscard]] Result<> reopen(std::optional<std::chrono::milliseconds> deadline = {});
    /// How many requests were sent once more.
    [[nodiscard]] std::uint64_t replays() const noexcept;

    /// Leases room for one tensor in the input slab, growing the channel by a slab where it is full.
    /// Errors  resources_exhausted naming the channel's bound, shape_mismatch (negative, overflow)
    [[nodiscard]] Result<Input> allocate(wire::DType dtype, std::span<const std::int64_t> dims);

    /// The same in memory of the GPU that worker and client share. Where they share none, or this process cannot import
    /// it (another container), the input lies in host memory: `Input::gpu` says which, `why_no_gpu` why. Errors  as
    /// `allocate`; out_of_memory of the GPU
    [[nodiscard]] Result<Input> allocate_on_gpu(wire::DType dtype, std::span<const std::int64_t> dims);
    /// From now on results lie on the GPU; `size_bytes` is the room for them to start with. Does nothing where
    /// `why_no_gpu` has a reason. Errors  as `allocate_on_gpu`
    [[nodiscard]] Result<> keep_outputs_on_gpu(std::uint64_t size_bytes);
    /// Why no tensor of this channel can lie on a GPU. Empty if they can.
    [[nodiscard]] std::optional<Error> why_no_gpu() const;

    /// The one in its options; may be null.
    [[nodiscard]] std::shared_ptr<const cuda::Gpu> gpu() const noexcept;

    /// Whether it was allocated on this channel, from any of its workers.
    [[nodiscard]] bool owns(const Input& input) const noexcept;

    /// `submit` and `wait` in one. Errors  the worker's own; worker_lost when it died
    [[nodiscard]] Result<Reply> infer(const Request& request);

    /// Sends a request and returns its number. The worker's welcome bounds how many may be in flight; one that is
    /// answered counts until it is waited for. Errors  queue_full (wait for an earlier one first), the code of the
    /// worker's `closing`, worker_lost,
    ///         input_invalid for an input of another channel
    [[nodiscard]] Result<std::uint64_t> submit(const Request& request);
    /// Ends at the request's deadline at the latest, with `deadline_exceeded`. Returns an answer that arrived before
    /// the worker died. Sends a lost retry-safe request once more; if that fails the error says why, and it is
    /// `worker_lost` if the next worker died of the request too.
    [[nodiscard]] Result<Reply> wait(std::uint64_t request_id);
    /// The next part of a request that was sent `in_parts`. A part without `more` is the last, and ends the request as
    /// `wait` does. Waits as long as `wait`. Returns the parts that have arrived before it returns an error. Errors  as
    /// `wait`; worker_lost says how many tokens had come, or how many parts; resources_exhausted where thousands were
    /// not taken
    [[nodiscard]] Result<Reply> next(std::uint64_t request_id);
    /// The request then ends with `cancelled`, unless it was already finished.
    [[nodiscard]] Result<> cancel(std::uint64_t request_id);
    /// Cancels it, and drops what still comes of it. Nobody may wait for it any more.
    void abandon(std::uint64_t request_id);

    /// Readable when an answer, or the end of the channel, has come; for callers with a loop of their own, who only
    /// poll it. Changes when the channel is reopened.
    [[nodiscard]] int fd();
    /// Handles the messages that the worker has sent, and returns unused slabs and leases. Never waits. For a channel
    /// at rest: call it when `fd` is readable and nothing waits for a request, so that the worker can ask for memory back, and
    /// from time to time, so that idle slabs (`slab_idle`) return. Errors  why the channel has ended
    Result<> receive();

private:
    explicit Channel(std::unique_ptr<ReconnectingChannel> channel);
    std::unique_ptr<ReconnectingChannel> channel_;
};

}  // namespace bulkhead

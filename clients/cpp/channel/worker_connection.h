#pragma once

/// The client's side of the protocol with one worker: the order of messages, checks of the
/// worker's messages, and the fate of requests when it dies. reconnecting_channel.h handles what
/// follows a death.

#include <functional>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <variant>
#include <vector>

#include "bulkhead/channel.h"
#include "clients/cpp/base/wait_ready.h"
#include "clients/cpp/channel/client_slabs.h"
#include "clients/cpp/channel/transport.h"
#include "ipc/base/packet.h"
#include "ipc/channel/channel_codec.h"

namespace bulkhead {

class WorkerConnection : public std::enable_shared_from_this<WorkerConnection> {
public:
    /// One request: what to send, and what is needed to send it once more.
    struct Sending {
        struct Tensor {
            std::string name;
            std::shared_ptr<const Input::Lease> lease;  ///< null for a forwarded one
            std::shared_ptr<Output::Lease> forwarded{};
            std::shared_ptr<const Loan> loan{};  ///< the loan of the slab that holds `forwarded`
        };
        std::string method;
        std::vector<Tensor> inputs;
        boost::json::object parameters;
        std::chrono::milliseconds deadline{0};
        bool retry_safe = false;
        bool in_parts = false;
        void* stream = nullptr;  ///< of inputs on the GPU
        bool awaited = false;    ///< the sender waits for it next, and then learns of the
                                 ///< worker's death
    };

    /// `channel` is unique in this process.
    static Result<std::shared_ptr<WorkerConnection>> open(UniqueFd socket, std::uint64_t channel,
                                                          const ChannelOptions& options);

    [[nodiscard]] const channel::Welcome& welcome() const noexcept { return *welcome_; }
    /// Readable when `receive_available` has something to do.
    [[nodiscard]] int fd() { return transport_.fd(); }
    /// Handles what has arrived, without blocking.
    /// Errors  what ended the channel; earlier answers remain
    Result<> receive_available();
    /// Whether `wait` for it would return at once.
    [[nodiscard]] bool answered(std::uint64_t request_id) const;

    /// Allocates on the GPU if `on_gpu` and the worker shares it, else in host memory.
    Result<std::shared_ptr<Input::Lease>> allocate(wire::DType dtype, std::span<const std::int64_t> dims,
                                                   bool on_gpu = false);
    /// See Channel.
    Result<> keep_outputs_on_gpu(std::uint64_t size_bytes);
    // The same in steps that never block. They return null, or false, while a slab is on its way;
    // after `receive_available` has taken it, call again with `asked` unchanged.
    Result<std::shared_ptr<Input::Lease>> allocate_or_ask(wire::DType dtype, std::span<const std::int64_t> dims,
                                                          bool on_gpu, bool& asked);
    Result<bool> keep_outputs_on_gpu_or_ask(std::uint64_t size_bytes, bool& asked);
    /// Copies any channel's GPU output to an input on the same GPU; the copy is queued
    /// on the stream.
    /// Errors  input_invalid: this connection shares no memory on that GPU; those of `allocate`
    Result<std::shared_ptr<const Input::Lease>> copy_on_gpu(Output::Lease& output, void* stream);
    [[nodiscard]] std::optional<Error> why_no_gpu() const;
    /// Why `submit` would refuse any request now.
    [[nodiscard]] std::optional<Error> why_not_now() const;
    [[nodiscard]] std::shared_ptr<const cuda::Gpu> gpu() const noexcept { return events_ ? events_->gpu() : nullptr; }
    /// Lends the slab to this connection's worker, which maps it once.
    /// Errors  resources_exhausted: too many slabs; the worker's own error
    Result<std::shared_ptr<const Loan>> borrow(const std::shared_ptr<OutputSlab>& slab);
    [[nodiscard]] bool lends() const noexcept { return (welcome_->features & wire::feature_lending) != 0; }
    /// All inputs must be in this connection's slabs (`owns`) or loans to it.
    Result<std::uint64_t> submit(Sending request);
    /// See Channel; `Channel::next` if `in_parts`. Waits until the request's own deadline, or
    /// `until` if that is earlier.
    Result<Reply> wait(std::uint64_t request_id, bool in_parts, Clock::time_point until);
    Result<> cancel(std::uint64_t request_id);
    void abandon(std::uint64_t request_id);

    [[nodiscard]] bool owns(const Input::Lease& lease) const noexcept { return slabs_.owns(*lease.slab); }
    [[nodiscard]] bool ended() const noexcept { return ended_.has_value(); }
    [[nodiscard]] bool closing() const noexcept { return closing_.has_value(); }
    /// Whether the worker's process ended without a previous `closing` or error.
    [[nodiscard]] bool died() const noexcept { return ended_ && ended_->died; }
    /// A retry-safe request that died unanswered with its worker. `take_lost` is empty for all
    /// others, and a second time.
    [[nodiscard]] bool has_lost(std::uint64_t request_id) const { return lost_.contains(request_id); }
    std::map<std::uint64_t, Sending>::node_type take_lost(std::uint64_t request_id) {
        return lost_.extract(request_id);
    }

    /// Returns unused slabs and leases; until the next request, leases are returned at once. Never
    /// blocks. Returns when to call it next.
    Clock::time_point settle();
    /// Queues one output lease for the worker; sent with the next request, or when many
    /// have gathered.
    void give_back(const wire::LeaseRef& lease);
    /// Unmaps GPU memory, which waits for all work that this process has queued there, then calls
    /// `then` on the channel's thread.
    using Unmapping = std::function<void(SlabMemory memory, std::function<void()> then)>;
    /// Without it, memory is unmapped at once, in place.
    void unmap_gpu_by(Unmapping unmapping) { unmapping_ = std::move(unmapping); }
    /// Unmaps a slab that nothing uses. `returned` is its number if the worker must be told.
    void unmap(SlabMemory memory, std::optional<std::uint32_t> returned);
    /// Call it once the connection has ended and another one has replaced it.
    void let_go() noexcept { slabs_.let_go(); }
    /// Returns loans that no request uses: all, or those of retired slabs.
    void return_loans(bool only_retired = true);

private:
    struct Pending {
        Sending request;          ///< the worker borrows its inputs until it answers
        Clock::time_point until;  ///< the client's own deadline
        std::optional<Result<Reply>> outcome;
        std::list<Reply> parts{};  ///< before the outcome, not yet taken
        std::uint64_t parts_came = 0;
        std::uint64_t tokens_came = 0;  ///< in those parts, for a generating model
        std::optional<Error> spoilt{};  ///< why no further part is kept; becomes the outcome
        bool abandoned = false;         ///< no caller waits; kept because the worker still borrows
    };
    using Requests = std::map<std::uint64_t, Pending>;

    WorkerConnection(Transport transport, std::uint64_t channel) : transport_{std::move(transport)}, slabs_{channel} {}

    Result<> await_welcome(Clock::time_point until, const ChannelOptions& options);
    Result<std::shared_ptr<Input::Lease>> allocate_on_host_or_ask(std::uint64_t size_bytes, wire::DType dtype,
                                                                  std::span<const std::int64_t> dims, bool& asked);
    /// Repeats `attempt(asked)` until it fails or is done. In between, waits for the slab
    /// that it asked for.
    template <typename Attempt>
    auto until_done(const Attempt& attempt) -> decltype(attempt(std::declval<bool&>())) {
        for (bool asked = false;;) {
            auto done = attempt(asked);
            if (!done || *done) return done;
            if (const Result<> grown = await_slab(); !grown) return grown.error();
        }
    }
    Result<> ask_for_slab(std::uint64_t size_bytes, wire::SlabDirection direction = wire::SlabDirection::input,
                          wire::SlabKind kind = wire::SlabKind::host_memfd);
    [[nodiscard]] std::optional<wire::SlabKind> gpu_kind() const;
    Result<bool> grow_on_gpu_or_ask(wire::SlabDirection direction, std::uint64_t size_bytes, wire::SlabKind kind,
                                    bool& asked);
    Result<> refuse_slab(const channel::SlabOffer& offer, const Error& reason);
    void lose_result(Requests::iterator request, const channel::InferResult& result, Error reason);
    Result<> order_inputs(const Sending& request, channel::Infer& message);
    /// Waits until each request for a slab, or loan, is answered. A refusal stays where `handle`
    /// stored it: it concerns the caller only if the caller asked.
    Result<> await_slab();
    Result<> await_loan();
    Result<> receive_while(std::string_view step, const auto& goes_on);
    [[nodiscard]] const channel::SlabRequest* growing() const { return std::get_if<channel::SlabRequest>(&growth_); }
    /// Takes the refusal, if there is one.
    template <typename Request>
    static std::optional<Error> refusal_of(std::variant<std::monostate, Request, Error>& request) {
        auto* const refused = std::get_if<Error>(&request);
        if (refused == nullptr) return std::nullopt;
        Error error = std::move(*refused);
        request = std::monostate{};
        return error;
    }
    [[nodiscard]] bool returns_inputs() const noexcept {
        return !ended_ && !closing_ && (welcome_->features & wire::feature_returning) != 0;
    }
    void return_idle_inputs();

    /// Receives and handles one packet. Errors  deadline_exceeded; else what ended the channel.
    Result<> receive_one(Clock::time_point until);
    Result<> handle(Packet& packet);
    Error closed();
    Result<> send(std::span<const std::byte> packet, std::span<const int> fds = {},
                  PacketTransport::Sleeper worker = PacketTransport::Sleeper::asked_after);
    std::vector<wire::LeaseRef> pack_releases(std::vector<std::byte>& request);
    void flush_releases(PacketTransport::Wake wake = PacketTransport::Wake::now);

    // One per message; an error means that the worker broke the protocol.
    Result<> handle(channel::Welcome&& message, std::vector<UniqueFd>&& fds);
    Result<> handle(channel::SlabOffer&& message, std::vector<UniqueFd>&& fds);
    Result<> handle(channel::InferResult&& message, std::vector<UniqueFd>&& fds);
    Result<> handle(channel::Failure&& message, std::vector<UniqueFd>&& fds);
    Result<> handle(channel::Closing&& message, std::vector<UniqueFd>&& fds);
    Result<> handle(channel::RingOffer&& message, std::vector<UniqueFd>&& fds);
    Result<> handle(channel::SlabAccepted&& message, std::vector<UniqueFd>&& fds);
    Result<> handle(channel::SlabWithdraw&& message, std::vector<UniqueFd>&& fds);
    Result<> handle(channel::EventOffer&& message, std::vector<UniqueFd>&& fds);
    template <typename Message>
    Result<> handle(Message&&, std::vector<UniqueFd>&&) {
        return Error{ErrorCode::protocol_violation, "a message that was not agreed", {}};
    }

    void take_part(Requests::iterator request, Reply part);
    void spoil(Requests::iterator request, Error reason);
    void answer(Requests::iterator request, Result<Reply> outcome);
    [[nodiscard]] Error lost(std::string_view what) const;
    Error end(Error reason, bool died = false);

    Transport transport_;
    std::uint64_t features_ = 0;  ///< that hello offered
    bool rings_owed_ = false;     ///< agreed by welcome; the offer must follow
    std::optional<channel::Welcome> welcome_;
    Unmapping unmapping_;
    ClientSlabs slabs_;
    std::chrono::milliseconds slab_idle_{0};
    Requests pending_;
    std::vector<wire::LeaseRef> releases_;
    std::vector<std::uint32_t> returns_;  ///< slabs to be named in slab_return
    bool rests_ = false;                  ///< no operation since `settle`
    std::uint64_t last_request_id_ = 0;
    /// Asked for and not yet answered; or refused, until somebody who asked looks.
    std::variant<std::monostate, channel::SlabRequest, Error> growth_;
    std::shared_ptr<GpuEvents> events_;  ///< set if the caller named a GPU
    wire::SlabKind gpu_kind_ = wire::SlabKind::cuda_vmm;
    std::optional<Error> gpu_refused_;  ///< why nothing is shared on the GPU although it was agreed
    struct Lending {
        std::uint64_t request_id;
        std::shared_ptr<Loan> loan;
    };
    std::variant<std::monostate, Lending, Error> lending_;  ///< lent and not yet answered; or
                                                            ///< refused, as above
    std::optional<channel::Closing> closing_;
    std::optional<Error> channel_error_;  ///< from request_id 0, with nothing after it
    struct End {
        Error reason;
        bool died;  ///< without a previous `closing` or error
    };
    std::optional<End> ended_;  ///< set once
    std::map<std::uint64_t, Sending> lost_;
};

}  // namespace bulkhead

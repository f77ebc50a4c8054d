#pragma once

/// The client's half of the protocol with one worker: who may speak when, what a worker's message must hold to be
/// believed, and what becomes of requests when it dies. `clients/cpp/channel_lines.h` knows what comes after that.

#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "clients/cpp/channel.h"
#include "clients/cpp/wait_ready.h"
#include "ipc/channel_codec.h"
#include "ipc/host_slab.h"
#include "ipc/packet.h"
#include "ipc/slab_allocator.h"

namespace bulkhead {

/// Shared by the channel and the leases in it: unmapped when the last of them is gone.
struct InputSlab {
    std::uint64_t channel;  ///< whose it is, under whichever worker
    std::uint32_t id;
    HostSlab memory;
    SlabAllocator allocator;
};

struct Input::Lease {
    std::shared_ptr<InputSlab> slab;
    SlabAllocator::Block block;
    wire::DType dtype;
    std::vector<std::int64_t> dims;

    Lease(std::shared_ptr<InputSlab> owner, const SlabAllocator::Block& range, wire::DType type,
          std::span<const std::int64_t> shape)
        : slab{std::move(owner)}, block{range}, dtype{type}, dims{shape.begin(), shape.end()} {}
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;
    ~Lease();
};

struct Output::Lease {
    channel::Tensor tensor;
    std::shared_ptr<const HostSlab> slab;
    std::weak_ptr<ChannelState> channel;  ///< gone: the worker has taken everything back already

    Lease(channel::Tensor described, std::shared_ptr<const HostSlab> owner, std::weak_ptr<ChannelState> line)
        : tensor{std::move(described)}, slab{std::move(owner)}, channel{std::move(line)} {}
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;
    ~Lease();
};

class ChannelState : public std::enable_shared_from_this<ChannelState> {
public:
    /// What is sent; also what it takes to send it once more.
    struct Sending {
        struct Tensor {
            std::string name;
            std::shared_ptr<const Input::Lease> lease;
        };
        std::string method;
        std::vector<Tensor> inputs;
        boost::json::object parameters;
        std::chrono::milliseconds deadline{0};
        bool retry_safe = false;
    };

    /// `channel` is a number that this process gives to no two channels.
    static Result<std::shared_ptr<ChannelState>> open(UniqueFd socket, std::uint64_t channel,
                                                      const ChannelOptions& options);

    [[nodiscard]] const channel::Welcome& welcome() const noexcept { return *welcome_; }
    [[nodiscard]] int fd() const noexcept { return socket_.get(); }

    Result<std::shared_ptr<Input::Lease>> allocate(wire::DType dtype, std::span<const std::int64_t> dims);
    /// All inputs lie in slabs of this line (`owns`).
    Result<std::uint64_t> submit(Sending request);
    Result<Reply> wait(std::uint64_t request_id);
    Result<> cancel(std::uint64_t request_id);

    [[nodiscard]] bool owns(const Input::Lease& lease) const noexcept;
    [[nodiscard]] bool ended() const noexcept { return ended_.has_value(); }
    [[nodiscard]] bool closing() const noexcept { return closing_.has_value(); }
    /// Its worker's process ended, without having said that it would, or what was wrong.
    [[nodiscard]] bool died() const noexcept { return died_; }
    /// A retry-safe request that died unanswered with its worker. Nothing for all others, and the second time.
    [[nodiscard]] bool has_lost(std::uint64_t request_id) const { return lost_.contains(request_id); }
    std::optional<Sending> take_lost(std::uint64_t request_id);

    /// Queues one output lease for the worker; sent with the next request, or when many have gathered.
    void give_back(const wire::LeaseRef& lease);

private:
    struct Pending {
        Sending request;          ///< its inputs are borrowed by the worker until it answers
        Clock::time_point until;  ///< the client's own patience
        std::optional<Result<Reply>> outcome;
        bool abandoned = false;  ///< nobody waits any more; kept because the worker still borrows
    };

    ChannelState(UniqueFd socket, std::uint64_t channel)
        : socket_{std::move(socket)}, channel_{channel}, buffer_(packet_bytes_max) {}

    Result<> await_welcome(Clock::time_point until, const std::string& client);
    Result<> ask_for_slab(std::uint64_t size_bytes);
    Result<> await_slab();

    /// Receives and handles one packet. Errors  deadline_exceeded; else what ended the channel.
    Result<> receive_one(Clock::time_point until);
    Result<> send(std::span<const std::byte> packet);
    void flush_releases();

    // One for each message; an error means that the worker broke the protocol.
    Result<> handle(channel::Welcome&& message, std::vector<UniqueFd>&& fds);
    Result<> handle(channel::SlabOffer&& message, std::vector<UniqueFd>&& fds);
    Result<> handle(channel::InferResult&& message, std::vector<UniqueFd>&& fds);
    Result<> handle(channel::Failure&& message, std::vector<UniqueFd>&& fds);
    Result<> handle(channel::Closing&& message, std::vector<UniqueFd>&& fds);
    template <typename Message>
    Result<> handle(Message&&, std::vector<UniqueFd>&&) {
        return Error{ErrorCode::protocol_violation, "a message that was not agreed", {}};
    }

    void answer(std::map<std::uint64_t, Pending>::iterator request, Result<Reply> outcome);
    [[nodiscard]] Error lost(std::string_view what) const;
    Error end(Error reason);

    UniqueFd socket_;
    std::uint64_t channel_;
    std::vector<std::byte> buffer_;
    std::optional<channel::Welcome> welcome_;
    std::vector<std::shared_ptr<InputSlab>> inputs_;
    std::map<std::uint32_t, std::shared_ptr<const HostSlab>> outputs_;
    std::uint64_t slab_bytes_ = 0;  ///< of all slabs
    std::map<std::uint64_t, Pending> pending_;
    std::vector<wire::LeaseRef> releases_;
    std::uint64_t last_request_id_ = 0;
    std::optional<channel::SlabRequest> growing_;  ///< asked for, not yet answered
    std::optional<Error> growth_refused_;
    std::optional<channel::Closing> closing_;
    std::optional<Error> channel_error_;  ///< request_id 0, and nothing has followed it
    std::optional<Error> ended_;          ///< why; set once
    bool died_ = false;
    std::map<std::uint64_t, Sending> lost_;
};

}  // namespace bulkhead

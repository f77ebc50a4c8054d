#pragma once

#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "bulkhead/channel.h"
#include "clients/cpp/base/wait_ready.h"
#include "clients/cpp/channel/worker_connection.h"

namespace bulkhead {

/// The part of a channel that outlives a worker: where to ask for the next one, which requests may
/// be sent once more, and dead workers' connections while a caller waits on them.
class ReconnectingChannel {
public:
    /// For an adopted channel. It has no connection until `replace_connection`.
    ReconnectingChannel();
    /// `socket` is the daemon's.
    ReconnectingChannel(std::filesystem::path socket, std::string model, const ChannelOptions& options);

    [[nodiscard]] const std::shared_ptr<WorkerConnection>& connection() const noexcept { return connection_; }
    [[nodiscard]] std::uint64_t replays() const noexcept { return replays_; }
    [[nodiscard]] bool owns(const Input& input) const noexcept { return owns(*input.lease_); }

    /// In a slab of the present connection.
    Result<Input> allocate(wire::DType dtype, std::span<const std::int64_t> dims, bool on_gpu);
    /// `awaited`: the caller calls `take` next.
    Result<std::uint64_t> submit(const Request& request, bool awaited = false);
    /// As `Channel::next` if `in_parts`, else as `Channel::wait`.
    Result<Reply> take(std::uint64_t request_id, bool in_parts);
    Result<> cancel(std::uint64_t request_id);
    void abandon(std::uint64_t request_id);
    /// Does nothing while the worker serves.
    Result<> reopen(std::optional<std::chrono::milliseconds> deadline);

    // The same in steps that never block, for `AsyncChannel`.

    /// One attempt at a connection: the question to the daemon, and how to open the connection.
    struct Introduction {
        boost::json::object params;  ///< of channel.open
        ChannelOptions options;
        int tries_left;
        std::optional<Clock::time_point> until{};
        std::optional<std::chrono::milliseconds> patience{};  ///< wait for the daemon's answer
    };
    [[nodiscard]] Introduction introduction(std::optional<std::chrono::milliseconds> deadline, int tries) const;
    /// All steps for a caller that may be blocked: opens a connection with the introduced worker.
    Result<> connect(ControlClient& control, Introduction asked);
    /// Returns the socket from the answer, to open the connection on.
    Result<UniqueFd> introduced(Introduction& asked, Result<Answer> answer);
    /// True if the introduced worker was dead, and there is time to ask for the next one.
    [[nodiscard]] static bool ask_again(Introduction& asked, const Error& failure);
    /// Continues with this connection, and resends the requests that may be sent once more.
    void replace_connection(std::shared_ptr<WorkerConnection> connection);
    [[nodiscard]] std::uint64_t number() const noexcept { return number_; }
    /// Empty while a slab is on its way; see WorkerConnection.
    std::optional<Result<Input>> allocate_or_ask(wire::DType dtype, std::span<const std::int64_t> dims, bool on_gpu,
                                                 bool& asked);

    /// `submit` on the present connection, even if that has ended. `asked`: the deadline's start.
    Result<std::uint64_t> submit_now(const Request& request, Clock::time_point asked, bool awaited = false);
    /// Whether a request refused with this error may be sent to the next worker.
    [[nodiscard]] bool may_retry(const Request& request, const Error& refusal) const noexcept;
    [[nodiscard]] Error not_reopened(const Error& reason) const;

    enum class RequestState {
        in_flight,
        answered,  ///< `take_now` has an outcome
        lost,      ///< with its worker; `replace_connection` resends it, or `give_up` ends it
    };
    [[nodiscard]] RequestState state_of(std::uint64_t request_id) const;
    /// The connection that carries a request in flight: the present one, or one whose worker
    /// drains.
    [[nodiscard]] const std::shared_ptr<WorkerConnection>& connection_of(std::uint64_t request_id) const {
        return in_flight_.at(request_id).connection;
    }
    /// `wait`, or `next` of a request `in_parts`, without blocking: cancels the request if
    /// nothing has arrived.
    /// Errors  also deadline_exceeded
    Result<Reply> take_now(std::uint64_t request_id, bool in_parts);
    /// The outcome of a lost request that cannot be sent again, with the reason.
    Result<Reply> give_up(std::uint64_t request_id, const Error& reason);

private:
    [[nodiscard]] bool owns(const Input::Lease& lease) const noexcept { return lease.slab->channel == number_; }
    /// Where to ask for the next worker.
    struct Origin {
        std::filesystem::path socket;
        std::string model;
        ChannelOptions options;
        bool stateful = true;  ///< until a daemon says otherwise: a stateful request is valid
                               ///< only on its worker
    };
    struct InFlight {
        std::shared_ptr<WorkerConnection> connection;
        std::uint64_t request_id = 0;              ///< in that connection
        std::optional<Clock::time_point> until{};  ///< the caller's deadline
        bool cancelled = false;                    ///< never sent again
        std::optional<std::uint64_t> lost_with{};  ///< the generation that died with it; set once it
                                                   ///< was sent again
        std::optional<Error> refused{};            ///< why it could not be sent again
    };

    using Requests = std::map<std::uint64_t, InFlight>;
    using Tensor = WorkerConnection::Sending::Tensor;

    static void limit(Introduction& asked);
    /// Whether the channel may reopen by itself, for a request that may be sent again.
    [[nodiscard]] bool can_reopen() const noexcept { return origin_ && !origin_->stateful && connection_->died(); }
    [[nodiscard]] bool is_lost(const InFlight& flight) const;
    static Result<Reply> outcome_of(InFlight& flight, bool in_parts = false,
                                    Clock::time_point until = Clock::time_point::max());
    static Error not_sent_again(const Error& loss, const Error& reason);
    Result<Reply> completed(Requests::iterator found, Result<Reply> outcome);
    void send_again(InFlight& flight, WorkerConnection::Sending request);
    Result<> place(Tensor& tensor, void* stream);
    Result<> copy(Tensor& tensor, wire::DType dtype, std::span<const std::int64_t> dims,
                  std::span<const std::byte> bytes);
    Result<> forward(Tensor& tensor, void* stream);

    std::uint64_t number_;          ///< marks our slabs
    std::optional<Origin> origin_;  ///< empty for an adopted channel
    std::shared_ptr<WorkerConnection> connection_;
    Requests in_flight_;  ///< by the caller's number
    std::uint64_t last_request_id_ = 0;
    std::uint64_t replays_ = 0;
};

}  // namespace bulkhead

#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include <boost/asio/io_context.hpp>

#include "config/fleet.h"
#include "worker/channel/token_streams.h"
#include "worker/link/identity.h"
#include "worker/link/link_messages.h"
#include "worker/loop/alarm.h"
#include "worker/loop/executor.h"
#include "worker/loop/packet_stream.h"
#include "worker/requests/dispatcher.h"
#include "worker/requests/request.h"
#include "worker/slabs/channel_slabs.h"
#include "worker/slabs/gpu_jobs.h"

namespace bulkhead::worker {

class ChannelSession;

/// What all sessions of a worker share.
struct SessionContext {
    boost::asio::io_context& io;
    std::span<std::byte> receive_buffer;
    Executor& executor;
    Dispatcher& dispatcher;
    StatusPage* page;  ///< null if there is none
    const Identity& identity;
    const config::ModelSpec& spec;
    Model& model;
    const boost::json::object& methods;  ///< as `welcome` describes them
    std::uint32_t in_flight_max;         ///< of one channel
    std::chrono::milliseconds hello_deadline;
    std::chrono::milliseconds unread_stream;  ///< a stream fails if its client takes no
                                              ///< part for this long
    std::shared_ptr<SlabBudget> slab_budget;  ///< shared by all channels
    GpuJobs& gpu_jobs;
};

/// Decides for the worker what a session cannot decide alone. Called on the event loop.
class SessionHost {
public:
    virtual ~SessionHost() = default;
    virtual void hello_came(ChannelSession& session) = 0;  ///< answers by `open` or
                                                           ///< `refuse`, now or later
    virtual void opened(ChannelSession& session) = 0;
    virtual void refused(ChannelSession& session, const Error& error) = 0;
    virtual void flushed() = 0;
    /// Called once, when the session is closed and no part of it runs. `was_refused`: its
    /// hello got an error.
    virtual void ended(ChannelSession& session, bool was_refused) = 0;
};

/// The worker's side of one client's channel (docs/channel.md).
///
/// A client that exits, breaks the protocol or does not read loses its channel. The session stays
/// until its running request has finished, because the model still reads its slabs.
///
/// Owns    the socket and the slabs
/// Thread  the event loop
class ChannelSession final : public Requester, public std::enable_shared_from_this<ChannelSession> {
public:
    /// A table in the source says which messages each state allows.
    enum class State : std::uint8_t {
        awaiting_hello,
        hello_said,  ///< the host has not answered it yet
        opening,     ///< making its first slabs
        open,
        draining,  ///< open; new requests get `worker_draining`
        refused,   ///< closed; its hello got an error
        closed,
        ended,  ///< closed, and no part of it runs
    };

    ChannelSession(const SessionContext& context, SessionHost& host, const ChannelMessage& arrival);
    ~ChannelSession() override;
    void start(UniqueFd socket);

    /// Makes the slabs, resets a stateful model, and says welcome.
    void open();
    /// Answers the hello with `error` and ends.
    void refuse(const Error& error);
    /// Answers requests in flight. A channel that is still opening is refused.
    void drain(std::chrono::milliseconds deadline);
    void close(std::string_view reason, State how = State::closed);

    [[nodiscard]] std::uint64_t id() const noexcept { return id_; }
    [[nodiscard]] State state() const noexcept { return state_; }
    [[nodiscard]] bool is_open() const noexcept { return state_ == State::open || state_ == State::draining; }
    [[nodiscard]] bool is_closed() const noexcept { return state_ >= State::refused; }
    /// Returns the session's descriptor without ownership; -1 once closed.
    [[nodiscard]] int descriptor() const noexcept { return is_closed() ? -1 : stream_->descriptor(); }
    [[nodiscard]] bool is_flushed() const noexcept { return is_closed() || stream_->outbox_empty(); }
    [[nodiscard]] bool peer_is_gone() const { return is_closed() || stream_->peer_is_gone(); }
    [[nodiscard]] std::uint64_t slab_bytes() const { return slabs_ ? slabs_->size_bytes() : 0; }
    /// Device memory that the client maps, as far as this worker knows; it stays pinned when
    /// the worker ends.
    [[nodiscard]] std::uint64_t gpu_bytes_lent() const { return is_closed() ? 0 : slabs_->gpu_bytes_lent(); }
    [[nodiscard]] std::int64_t client_pid() const noexcept { return client_pid_; }
    [[nodiscard]] const std::string& client() const noexcept { return client_; }
    [[nodiscard]] std::uint64_t ignored_frames() const noexcept { return stream_ ? stream_->ignored_frames() : 0; }
    /// Gives up the slabs to reclaim the session. The last owner frees the memory.
    [[nodiscard]] std::shared_ptr<ChannelSlabs> give_up_slabs() noexcept { return std::move(slabs_); }

    void part(const PendingRequest& request, std::span<const std::int32_t> tokens) override;
    void completed(const PendingRequest& request, Completion completion) override;
    void failed(const PendingRequest& request, const Error& error) override;
    void let_go(const PendingRequest& request) override;

private:
    void on_packet(Packet& packet);
    void on_one_message(Packet& packet);
    [[nodiscard]] bool agreed(std::uint64_t feature) const noexcept { return (features_ & feature) != 0; }
    void on_message(const channel::Hello& message);
    void on_message(const channel::SlabRequest& message);
    void on_message(channel::Infer& message);
    void on_message(const channel::Cancel& message);
    void on_message(const channel::Release& message);
    void on_message(channel::SlabLend& message);
    void on_message(const channel::SlabReturn& message);
    void not_agreed();
    void slabs_made(const Result<>& made);
    [[nodiscard]] std::string label() const;  ///< with which those of this channel's memfds begin
    [[nodiscard]] std::unique_ptr<RingEnd> make_rings() const;
    void use_rings(std::unique_ptr<RingEnd> rings);  ///< offers them to the client first
    /// `executor` takes long; `gpu`: it calls the driver.
    enum class Where : std::uint8_t { loop, executor, gpu };
    [[nodiscard]] static Where where_to_make(std::uint64_t slab_bytes) noexcept;  ///< a host slab
    /// Runs `job` there, then `then` on the event loop, unless the channel is closed by then.
    void run(Where where, std::function<Result<>()> job, std::function<void(const Result<>&)> then);
    /// Runs `make` there. Calls `then` on success, while the channel is open.
    void make_slab(std::uint64_t request_id, Where where, std::function<Result<>()> make, std::function<void()> then);
    void watch_idle_slabs();
    void withdraw_gpu_slabs();
    void drop_returned_slabs();
    void wait_for_gpu();  ///< on the executor, before slabs are freed there
    Result<> try_submit(channel::Infer& message);
    [[nodiscard]] std::size_t unanswered() const;
    void send_parts();
    void send_part(const channel::InferResult& part);
    [[nodiscard]] Clock::time_point end_unread_streams();

    void send(std::span<const std::byte> bytes, std::span<const int> fds = {});
    void send_offers();
    void fail(std::uint64_t request_id, const Error& error);
    /// Tells the client the error, then closes.
    void break_off(const Error& error, State how = State::closed);
    void fail_or_count(std::uint64_t request_id, const Error& error);
    void count_violation(std::uint64_t request_id, const Error& error);
    void end_if_unused();

    const SessionContext& context_;
    SessionHost& host_;
    const std::uint64_t id_;
    std::string client_;          ///< its name, for the log
    std::uint64_t features_ = 0;  ///< that both sides support
    UniqueFd lent_;               ///< the descriptor of the message being read
    const std::int64_t client_pid_;
    State state_ = State::awaiting_hello;
    std::shared_ptr<PacketStream> stream_;
    std::shared_ptr<ChannelSlabs> slabs_;
    TokenStreams token_streams_;
    std::vector<const PendingRequest*> in_flight_;  ///< the dispatcher's; from submit to `let_go`
    std::size_t slabs_pending_ = 0;                 ///< jobs of `run` on the executor
    std::uint32_t violations_ = 0;
    Alarm hello_deadline_;
    Alarm idle_slabs_;
    Alarm unread_streams_;
};

}  // namespace bulkhead::worker

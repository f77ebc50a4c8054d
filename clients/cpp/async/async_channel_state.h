#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <variant>
#include <vector>

#include <boost/asio/any_io_executor.hpp>
#include <boost/asio/awaitable.hpp>
#include <boost/asio/cancellation_signal.hpp>
#include <boost/asio/posix/stream_descriptor.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>

#include "bulkhead/async_channel.h"
#include "clients/cpp/async/async_control_state.h"
#include "clients/cpp/async/idle_poller.h"
#include "clients/cpp/channel/reconnecting_channel.h"

namespace bulkhead {

/// Opens a connection, from hello to the last slab, on another thread than the loop's: a worker has
/// 10 s for it. Takes the socket. `channel` is the channel's number.
/// Errors  as `WorkerConnection::open`
boost::asio::awaitable<Result<std::shared_ptr<WorkerConnection>>>
open_connection(UniqueFd& socket, std::uint64_t channel, const ChannelOptions& options);

/// `ReconnectingChannel::connect` for a loop: opens a connection with the worker that the
/// daemon introduces.
boost::asio::awaitable<Result<std::shared_ptr<WorkerConnection>>>
connect_connection(std::shared_ptr<AsyncControlState> control, ReconnectingChannel& channel,
                   ReconnectingChannel::Introduction asked);

/// The operations of an `AsyncChannel`, and the pump that advances them, all on one executor.
class AsyncChannelState : public std::enable_shared_from_this<AsyncChannelState> {
public:
    /// `control` is null for an adopted channel; `channel` already has its first connection.
    static Result<AsyncChannel> make(boost::asio::any_io_executor executor, std::shared_ptr<AsyncControlState> control,
                                     std::unique_ptr<ReconnectingChannel> channel);
    void infer(Request request, Completing<Reply> completing);
    void allocate(wire::DType dtype, std::vector<std::int64_t> dims, bool on_gpu, Completing<Input> completing);
    void keep_outputs_on_gpu(std::uint64_t size_bytes, Completing<void> completing);
    void reopen(std::optional<std::chrono::milliseconds> deadline, Completing<void> completing);
    void close();

    // A request whose answer is taken in parts. `stream` returns its number, which the
    // other two take.
    std::uint64_t stream(Request request);
    void next(std::uint64_t number, Completing<Reply> completing);
    void abandon(std::uint64_t number);

    [[nodiscard]] ReconnectingChannel& channel() const noexcept { return *channel_; }
    [[nodiscard]] const boost::asio::any_io_executor& executor() const noexcept { return executor_; }

private:
    struct Inference {
        struct Queued {};  ///< waits for the next worker
        struct InFlight {
            std::uint64_t request_id;  ///< of `channel_`
        };
        struct Ended {
            Result<Reply> outcome;  ///< of a stream with no wait under way
        };
        std::variant<Queued, InFlight, Ended> state;
        std::optional<Completing<Reply>> completing;  ///< for a stream, only during a wait
        Request request;
        Clock::time_point asked;

        [[nodiscard]] const InFlight* in_flight() const noexcept { return std::get_if<InFlight>(&state); }
    };
    /// Needs room in a slab, or on the GPU, and may wait for one more slab.
    struct SlabWait {
        /// Completes the wait, at once with `reason` if that is not null. False while there is no
        /// room.
        std::function<bool(bool& asked, const Error* reason)> advance;
        bool asked = false;  ///< the slab or refusal on its way is for this one
    };
    struct Reopening {
        Completing<void> completing;
    };
    /// Waits on a connection's descriptor and keeps the connection. Does not own the descriptor.
    struct Watch {
        Watch(const boost::asio::any_io_executor& executor, std::shared_ptr<WorkerConnection> of)
            : connection{std::move(of)}, io{executor, connection->fd()} {}
        ~Watch() { io.release(); }

        std::shared_ptr<WorkerConnection> connection;
        boost::asio::posix::stream_descriptor io;
        bool waits = false;
        bool is_needed = false;  ///< an operation waits for this worker's messages
    };
    struct Operation {
        std::variant<Inference, SlabWait, Reopening> kind;
        Clock::time_point until;  ///< the client's own deadline
    };
    using Operations = std::map<std::uint64_t, Operation>;

    AsyncChannelState(boost::asio::any_io_executor executor, std::shared_ptr<AsyncControlState> control,
                      std::unique_ptr<ReconnectingChannel> channel);

    std::uint64_t add(Operation operation, boost::asio::cancellation_slot slot);
    std::uint64_t add_inference(Request request, std::optional<Completing<Reply>> completing);
    template <typename T>
    void add_slab_wait(std::function<std::optional<Result<T>>(bool& asked)> attempt, Completing<T> completing);
    void cancel_by(boost::asio::cancellation_slot slot, std::uint64_t number);
    void cancel(std::uint64_t number);

    /// Advances each operation as far as possible, then schedules the next call. Runs
    /// after every change.
    void pump();
    void pump_soon();
    /// True if the operation needs a connection with the next worker.
    bool advance(Operations::iterator operation);
    bool advance(Operations::iterator operation, Inference& inference);
    void advance(Operations::iterator operation, SlabWait& wait);
    /// Delivers an outcome, or a part.
    void finish(Operations::iterator operation, Inference& inference, Result<Reply> outcome);
    void end(Operations::iterator operation, const Error& reason);
    template <typename T>
    void complete(Completing<T> completing, Result<T> outcome);

    /// `deadline` belongs to operation `hasty`, the only one that ends when it passes.
    void start_reopening(std::optional<std::chrono::milliseconds> deadline, std::uint64_t hasty = 0);
    void reopened(Result<std::shared_ptr<WorkerConnection>> connection, std::uint64_t hasty);

    /// Waits for workers' messages while an operation needs them.
    void watch();
    void watch(const std::shared_ptr<WorkerConnection>& connection);
    void set_alarm();
    void poll_idle();

    enum class Phase {
        serving,    ///< or its worker is lost, but no operation needs the next one yet
        reopening,  ///< asking for the next worker
        closed,     ///< the AsyncChannel was dropped
    };

    boost::asio::any_io_executor executor_;
    std::shared_ptr<AsyncControlState> control_;
    std::unique_ptr<ReconnectingChannel> channel_;
    Phase phase_ = Phase::serving;
    Operations operations_;
    std::uint64_t last_operation_ = 0;

    /// Watches for the present connection, and for draining ones that still owe answers.
    std::vector<std::shared_ptr<Watch>> watches_;
    boost::asio::steady_timer alarm_;  ///< set to the earliest `until`
    std::shared_ptr<IdlePoller> idle_poller_;
    std::uint64_t last_operation_polled_ = 0;  ///< at the last run of `poll_idle`
    bool rests_ = false;                       ///< no operation since then; `idle_poller_`
                                               ///< watches the connection
};

template <typename T>
void AsyncChannelState::complete(Completing<T> completing, Result<T> outcome) {
    if (auto slot = completing.slot(); slot.is_connected()) slot.clear();
    // Posted: this may run in the function that started the operation, and the handler may
    // start another.
    boost::asio::post(executor_, [completing = std::move(completing), outcome = std::move(outcome)]() mutable {
        std::move(completing)(std::move(outcome));
    });
}

}  // namespace bulkhead

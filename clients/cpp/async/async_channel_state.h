#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>

#include <boost/asio/any_io_executor.hpp>
#include <boost/asio/awaitable.hpp>
#include <boost/asio/posix/stream_descriptor.hpp>
#include <boost/asio/steady_timer.hpp>

#include "bulkhead/async_channel.h"
#include "clients/cpp/async/async_control_state.h"
#include "clients/cpp/async/idle_poller.h"
#include "clients/cpp/async/signal.h"
#include "clients/cpp/channel/reconnecting_channel.h"

namespace bulkhead {

/// The lines of an `AsyncChannel`, and who waits for what on them. Everything happens on one executor.
class AsyncChannelState : public std::enable_shared_from_this<AsyncChannelState> {
public:
    template <typename T>
    using Awaitable = boost::asio::awaitable<T>;

    /// `control` is null for an adopted channel.
    AsyncChannelState(boost::asio::any_io_executor executor, std::shared_ptr<AsyncControlState> control,
                      std::unique_ptr<ReconnectingChannel> lines);
    ~AsyncChannelState();

    static Awaitable<Result<AsyncChannel>> open(std::shared_ptr<AsyncControlState> control, std::string model,
                                                ChannelOptions options);
    static Awaitable<Result<AsyncChannel>> adopt(boost::asio::any_io_executor executor,
                                                 std::shared_ptr<UniqueFd> socket, ChannelOptions options);
    /// The handle of one whose first line is open.
    static Result<AsyncChannel> handle_of(std::shared_ptr<AsyncChannelState> state);
    Awaitable<Result<Input>> allocate(wire::DType dtype, std::vector<std::int64_t> dims, bool on_gpu);
    Awaitable<Result<>> keep_outputs_on_gpu(std::uint64_t size_bytes);
    Awaitable<Result<>> reopen(std::optional<std::chrono::milliseconds> deadline);
    void infer(Request request, Completing<Reply> completing);
    void close();

    // A request whose answer is taken in parts. `stream` returns the number that the others name it by.
    std::uint64_t stream(Request request);
    void next(std::uint64_t operation, Completing<Reply> completing);
    void abandon(std::uint64_t operation);

    [[nodiscard]] ReconnectingChannel& channel() const noexcept { return *channel_; }
    [[nodiscard]] const boost::asio::any_io_executor& executor() const noexcept { return executor_; }

private:
    /// One request: waiting for the next worker, or in flight, or a stream whose end nobody has taken yet.
    struct Operation {
        std::optional<Completing<Reply>> completing;  ///< of a stream only while somebody waits
        Request request;
        Clock::time_point asked;
        Clock::time_point until;                ///< the client's own patience
        std::optional<Result<Reply>> outcome{};  ///< of a stream for which nobody waited
    };
    using Operations = std::map<std::uint64_t, Operation>;

    /// What may need one more slab, in steps: done, or not yet, with `asked` to be passed once more.
    using Step = std::function<Result<bool>(bool& asked)>;
    Awaitable<Result<>> grow_until_done(Step step);
    std::uint64_t begin(Request request, std::optional<Completing<Reply>> completing);
    void cancel_by(Completing<Reply>& completing, std::uint64_t operation);
    void complete(Completing<Reply> completing, Result<Reply> outcome);
    [[nodiscard]] bool is_waited_for() const;
    void submit(std::uint64_t operation);
    void cancel(std::uint64_t operation);
    /// Hands out an outcome, or a part.
    void finish(Operations::iterator operation, Result<Reply> outcome);
    /// Hands out what has been answered, ends what is too late, and waits for more.
    void look();
    void look_later();
    void watch();
    void unwatch();
    void arm();
    void attend();
    void leave_rest();
    void begin_renewal();
    static Awaitable<void> renew(std::shared_ptr<AsyncChannelState> self,
                                 std::optional<std::chrono::milliseconds> deadline);

    boost::asio::any_io_executor executor_;
    std::shared_ptr<AsyncControlState> control_;
    std::unique_ptr<ReconnectingChannel> channel_;
    std::optional<boost::asio::posix::stream_descriptor> io_;  ///< only waits; the descriptor is the line's
    boost::asio::steady_timer alarm_;                          ///< at the first of all `until`
    Operations operations_;
    std::map<std::uint64_t, std::uint64_t> in_flight_;  ///< operation → the lines' number of it
    std::uint64_t last_operation_ = 0;
    std::uint64_t attended_operation_ = 0;  ///< the last one when `attend` ran
    bool rests_ = false;                    ///< nothing was asked for since, and `attendant_` waits at the line
    std::shared_ptr<IdlePoller> attendant_;
    int growing_ = 0;                 ///< coroutines that wait for a slab
    const void* asker_ = nullptr;     ///< whose question the slab, or the refusal, answers
    std::uint64_t renewals_ = 0;
    bool watching_ = false;
    bool renewing_ = false;
    bool closed_ = false;
    std::optional<Error> renewal_;  ///< why the last one failed; read by those who waited for it
    Signal changed_;                ///< something was received, or a renewal ended
};

}  // namespace bulkhead

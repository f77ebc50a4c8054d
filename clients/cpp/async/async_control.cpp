#include "bulkhead/async_control.h"

#include <algorithm>
#include <utility>

#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <fmt/format.h>

#include "clients/cpp/async/async_control_state.h"
#include "clients/cpp/async/blocking_threads.h"
#include "clients/cpp/async/spawn.h"
#include "clients/cpp/base/limits.h"
#include "clients/cpp/control/control_rules.h"

namespace bulkhead {

namespace asio = boost::asio;
namespace json = boost::json;
using control::Repeat;

namespace {

Error closed(std::string_view what) {
    return {ErrorCode::cancelled, fmt::format("{}: its AsyncControl was dropped", what), {}};
}

}  // namespace

struct AsyncControlState::Connection {
    ControlConnection socket;
    asio::posix::stream_descriptor io;  ///< only for waits; `socket` owns the descriptor
    std::map<std::int64_t, Exchange*> exchanges;
    std::int64_t last_id = 0;
    std::string unsent;
    std::uint64_t queued_bytes = 0, sent_bytes = 0;  ///< since it was opened
    bool reading = false, writing = false;
    bool ended = false;

    Connection(ControlConnection made, const asio::any_io_executor& executor)
        : socket{std::move(made)}, io{executor, socket.fd()} {}
    ~Connection() { io.release(); }
};

/// Notifies each call that awaits an answer on it; the method decides whether the call is repeated.
void AsyncControlState::end(Connection& connection, const std::optional<Error>& reason) {
    if (std::exchange(connection.ended, true)) return;
    connection.io.cancel();
    if (connection_.get() == &connection) connection_.reset();
    if (subscribed_on_.get() == &connection) {
        subscribed_on_.reset();
        queue_.lose();
    }
    for (const auto& [id, exchange] : connection.exchanges) {
        const bool whole = connection.sent_bytes >= exchange->end_of_line;
        exchange->lost = whole ? Exchange::Lost::maybe_read : Exchange::Lost::unread;
        if (reason) exchange->answer = *reason;
        exchange->changed.notify();
    }
    connection.exchanges.clear();
    changed_.notify();
}

void AsyncControlState::close() {
    closed_ = true;
    if (connection_) end(*std::shared_ptr{connection_}, closed("waiting for the daemon"));
    changed_.notify();
}

bool AsyncControlState::is_read(const Connection& connection) const noexcept {
    return !connection.exchanges.empty() || (event_readers_ > 0 && subscribed_on_.get() == &connection);
}

void AsyncControlState::keep_reading(const std::shared_ptr<Connection>& connection) {
    if (connection->ended) return;
    if (!is_read(*connection)) return static_cast<void>(connection->io.cancel());
    if (!std::exchange(connection->reading, true))
        asio::co_spawn(executor_, read(shared_from_this(), connection), asio::detached);
}

AsyncControlState::Awaitable<void> AsyncControlState::read(std::shared_ptr<AsyncControlState> self,
                                                           std::shared_ptr<Connection> connection) {
    while (!connection->ended && self->is_read(*connection)) {
        const auto [failure] = co_await connection->io.async_wait(asio::posix::descriptor_base::wait_read,
                                                                  asio::as_tuple(asio::use_awaitable));
        if (connection->ended) break;
        if (failure == asio::error::operation_aborted) continue;
        if (failure) co_return self->end(*connection, system_error("waiting for the daemon", failure.value()));
        const Result<bool> open = connection->socket.receive_some();
        if (!open) co_return self->end(*connection, open.error());
        for (;;) {
            Result<std::optional<json::object>> object = connection->socket.next();
            if (!object) co_return self->end(*connection, object.error());
            if (!*object) break;
            self->take(*connection, std::move(**object));
            if (connection->ended) co_return;
        }
        if (!*open) co_return self->end(*connection);
    }
    connection->reading = false;
}

AsyncControlState::Awaitable<void> AsyncControlState::write(std::shared_ptr<AsyncControlState> self,
                                                            std::shared_ptr<Connection> connection) {
    while (!connection->ended && !connection->unsent.empty()) {
        const Result<std::optional<std::size_t>> sent = connection->socket.send_some(connection->unsent);
        if (!sent) co_return self->end(*connection, sent.error());
        if (!*sent) break;  // reads answers that the daemon sent before, up to the end
        connection->unsent.erase(0, **sent);
        connection->sent_bytes += **sent;
        if (**sent == 0)
            co_await connection->io.async_wait(asio::posix::descriptor_base::wait_write,
                                               asio::as_tuple(asio::use_awaitable));
    }
    connection->writing = false;
}

/// Handles one line of the daemon. Claims descriptors at once: they arrive in the order
/// of the answers.
void AsyncControlState::take(Connection& connection, json::object object) {
    const json::value* id = object.if_contains("id");
    if (id == nullptr) {
        const json::value* method = object.if_contains("method");
        const json::value* params = object.if_contains("params");
        if (method == nullptr || params == nullptr || !params->is_object() || *method != "event") return;
        if (subscribed_on_.get() != &connection) return;
        queue_.push(params->get_object());
        return changed_.notify();
    }
    json::object data;
    const json::value* error = object.if_contains("error");
    // The daemon could not, or will not, read a request: the connection is useless.
    if (id->is_null() && error != nullptr) return end(connection, control::error_from(*error, data));

    const auto found = id->is_int64() ? connection.exchanges.find(id->get_int64()) : connection.exchanges.end();
    const bool refused = error != nullptr;
    Result<Answer> answer = control::answer_from(std::move(object), connection.socket, data);
    const bool broken = !answer && answer.error().code == ErrorCode::protocol_violation && !refused;
    if (found != connection.exchanges.end()) {
        found->second->answer = std::move(answer);
        found->second->changed.notify();
        connection.exchanges.erase(found);
    }
    if (broken) end(connection);
}

/// Ends with an answer, with the connection, at `until`, or by a cancellation.
AsyncControlState::Awaitable<void> AsyncControlState::exchange(std::shared_ptr<Connection> connection,
                                                               std::string_view method, const json::object& params,
                                                               Clock::time_point until, Exchange& result) {
    const asio::cancellation_state caller = co_await asio::this_coro::cancellation_state;
    const std::int64_t id = ++connection->last_id;
    Result<std::string> line = control::request_line(id, method, params);
    if (!line) {
        result.answer = line.error();
        co_return;
    }
    connection->unsent += *line;
    result.end_of_line = connection->queued_bytes += line->size();
    connection->exchanges.emplace(id, &result);
    // Unregisters even if the coroutine is destroyed with its loop.
    const struct Registered {
        AsyncControlState& state;
        const std::shared_ptr<Connection>& connection;
        std::int64_t id;
        ~Registered() {
            connection->exchanges.erase(id);
            state.keep_reading(connection);
        }
    } registered{*this, connection, id};
    keep_reading(connection);
    if (!std::exchange(connection->writing, true))
        asio::co_spawn(executor_, write(shared_from_this(), connection), asio::detached);
    while (!result.answer && result.lost == Exchange::Lost::no && Clock::now() < until && !is_cancelled(caller))
        co_await result.changed.wait(until);
}

AsyncControlState::Awaitable<Result<Answer>> AsyncControlState::call(std::string method, json::object params,
                                                                     Clock::time_point until) {
    co_await wait_through_cancellation();
    const asio::cancellation_state caller = co_await asio::this_coro::cancellation_state;
    const Repeat repeat = control::repeat_of(method);
    const Clock::time_point asked = Clock::now();
    const json::object first = params;
    for (bool was_sent = false;;) {
        if (!connection_) {
            if (const Result<> connected = co_await connect(until); !connected) {
                if (was_sent && repeat == Repeat::to_end && connected.error().code == ErrorCode::not_running)
                    co_return Answer{control::stopped_without_receipts(), {}};
                co_return Error{connected.error()}.during(method);
            }
            if (!connection_) continue;
            params = control::params_again(first, Clock::now() - asked, was_sent && repeat == Repeat::marked);
        }
        Exchange exchange;
        co_await this->exchange(connection_, method, params, until, exchange);
        if (exchange.answer) {
            if (*exchange.answer) co_return std::move(*exchange.answer);
            co_return closed_ ? closed(method) : exchange.answer->error();
        }
        if (exchange.lost == Exchange::Lost::no) {
            if (is_cancelled(caller)) co_return cancelled(method);
            std::optional<Error> hung = co_await hang();
            co_return (hung ? std::move(*hung)
                            : Error{ErrorCode::deadline_exceeded, "waiting for the daemon's answer",
                                    "wait longer, or look at `bulkhead ps`"})
                .during(method);
        }
        const bool maybe_read = exchange.lost == Exchange::Lost::maybe_read;
        was_sent = was_sent || maybe_read;
        if (maybe_read && repeat == Repeat::never) co_return control::lost_answer(method);
    }
}

/// Probes on another thread: it asks the kernel and waits for a ping, up to limits::hang_probe.
AsyncControlState::Awaitable<std::optional<Error>> AsyncControlState::hang() {
    // Named: GCC 12 destroys a closure twice if it is a temporary of a co_await (PR 99576).
    const auto probe = [path = path_]() -> Awaitable<std::optional<Error>> {
        co_return control::hang_of_supervisor(path);
    };
    co_return co_await asio::co_spawn(BlockingThreads::of(executor_), probe, asio::use_awaitable);
}

AsyncControlState::Awaitable<Result<>> AsyncControlState::connect(Clock::time_point until) {
    const asio::cancellation_state caller = co_await asio::this_coro::cancellation_state;
    while (connecting_ && !closed_ && Clock::now() < until && !is_cancelled(caller)) co_await changed_.wait(until);
    if (closed_) co_return closed("connecting");
    if (connection_) co_return Result<>{};
    if (is_cancelled(caller)) co_return cancelled("connecting");
    if (connecting_) co_return control::no_supervisor(limits::absence);
    connecting_ = true;
    const struct Connecting {
        AsyncControlState& state;
        ~Connecting() {
            state.connecting_ = false;
            state.changed_.notify();
        }
    } connecting{*this};
    co_return co_await connect_and_ping(until);
}

/// Connects until a supervisor answers. The first connection is used without a ping, as
/// in `ControlClient`. A keeper without a supervisor accepts connections too: they wait
/// in its backlog.
AsyncControlState::Awaitable<Result<>> AsyncControlState::connect_and_ping(Clock::time_point until) {
    const asio::cancellation_state caller = co_await asio::this_coro::cancellation_state;
    const Clock::time_point start = Clock::now();
    const Clock::time_point patience = std::min(until, deadline_in(limits::absence));
    for (auto pause = limits::reconnect_pause;; pause = std::min(2 * pause, limits::reconnect_pause_max)) {
        Result<ControlConnection> socket = ControlConnection::connect(path_, false);
        if (socket) {
            const auto connection = std::make_shared<Connection>(std::move(*socket), executor_);
            bool alive = !was_connected_;
            if (!alive) {
                Exchange ping;
                const json::object nothing;
                co_await exchange(connection, "daemon.ping", nothing, patience, ping);
                // A supervisor that refuses the connection says so before it closes it.
                if (ping.lost != Exchange::Lost::no && ping.answer) co_return ping.answer->error();
                alive = ping.answer.has_value();
            }
            if (alive && !closed_) {
                connection_ = connection;
                was_connected_ = true;
                co_return Result<>{};
            }
            end(*connection);
        } else if (socket.error().code != ErrorCode::deadline_exceeded) {
            // That means a full backlog.
            co_return std::move(socket).error();
        }
        if (closed_) co_return closed("connecting");
        if (is_cancelled(caller)) co_return cancelled("connecting");
        if (Clock::now() >= patience) {
            if (auto hung = co_await hang()) co_return std::move(*hung);
            co_return control::no_supervisor(Clock::now() - start);
        }
        Signal never;
        co_await never.wait(std::min(patience, Clock::now() + pause));
    }
}

/// Subscribes if needed, and asks for the fleet's state if events were lost.
AsyncControlState::Awaitable<Result<>> AsyncControlState::resume_events() {
    const asio::cancellation_state caller = co_await asio::this_coro::cancellation_state;
    for (;;) {
        if (!connection_)
            if (const Result<> connected = co_await connect(deadline_in(limits::call)); !connected)
                co_return connected.error();
        const std::shared_ptr<Connection> here = connection_;
        if (!here) continue;
        const json::object wanted = subscription(*subscribed_to_), no_params;
        const auto ask = [&](std::string_view method, const json::object& params) -> Awaitable<Result<Answer>> {
            Exchange exchange;
            co_await this->exchange(here, method, params, deadline_in(limits::call), exchange);
            if (exchange.answer) co_return std::move(*exchange.answer);
            if (is_cancelled(caller)) co_return cancelled(method);
            co_return control::lost_answer(method);
        };
        if (subscribed_on_ != here) {
            // Before the answer: events may arrive before the waiting coroutine runs.
            subscribed_on_ = here;
            queue_.collect();
            const Result<Answer> asked = co_await ask("events.subscribe", wanted);
            if (subscribed_on_ != here && !closed_ && !is_cancelled(caller)) continue;
            if (!asked) {
                subscribed_on_.reset();
                queue_.lose();
                co_return asked.error();
            }
        }
        queue_.collect();
        json::value status;
        if (queue_.has_gap()) {
            Result<Answer> answer = co_await ask("fleet.status", no_params);
            if (subscribed_on_ != here && !closed_ && !is_cancelled(caller)) continue;
            if (!answer) co_return answer.error();
            status = std::move(answer->result);
        }
        queue_.resume(status);
        co_return Result<>{};
    }
}

AsyncControlState::Awaitable<Result<json::object>> AsyncControlState::next_event(std::vector<std::string> models) {
    co_await wait_through_cancellation();
    const asio::cancellation_state caller = co_await asio::this_coro::cancellation_state;
    if (!subscribed_to_) subscribed_to_ = std::move(models);
    if (std::holds_alternative<Error>(resume_)) resume_ = std::monostate{};
    const struct Reader {
        AsyncControlState& state;
        explicit Reader(AsyncControlState& of) : state{of} { ++state.event_readers_, look(); }
        ~Reader() { --state.event_readers_, look(); }
        void look() const {
            if (state.subscribed_on_) state.keep_reading(state.subscribed_on_);
        }
    } reader{*this};
    for (;;) {
        if (closed_) co_return closed("waiting for an event");
        if (auto event = queue_.pop()) co_return std::move(*event);
        if (is_cancelled(caller)) co_return cancelled("waiting for an event");
        if (auto* const failed = std::get_if<Error>(&resume_)) {
            Error failure = std::move(*failed);
            resume_ = std::monostate{};
            co_return std::move(failure).during("subscribing to events");
        }
        if (!std::holds_alternative<Running>(resume_) && (!subscribed_on_ || queue_.has_gap())) {
            resume_ = Running{};
            // In a coroutine of its own, because this one may be cancelled, and half a subscription
            // could not be undone.
            asio::co_spawn(executor_, resume_events(),
                           [self = shared_from_this()](const std::exception_ptr& thrown, Result<> resumed) {
                               self->resume_ = std::monostate{};
                               if (!resumed) self->resume_ = resumed.error();
                               self->changed_.notify();
                               if (thrown) std::rethrow_exception(thrown);
                           });
            continue;
        }
        co_await changed_.wait(deadline_in(limits::call));
    }
}

AsyncControl::AsyncControl(asio::any_io_executor executor, std::filesystem::path socket)
    : state_{std::make_shared<AsyncControlState>(std::move(executor), std::move(socket))} {}
AsyncControl::AsyncControl(AsyncControl&&) noexcept = default;
AsyncControl& AsyncControl::operator=(AsyncControl&& other) noexcept {
    AsyncControl previous{std::move(*this)};
    state_ = std::move(other.state_);
    return *this;
}
AsyncControl::~AsyncControl() {
    if (state_) asio::dispatch(state_->executor(), [state = state_] { state->close(); });
}

const std::filesystem::path& AsyncControl::path() const noexcept { return state_->path(); }
asio::any_io_executor AsyncControl::get_executor() const noexcept { return state_->executor(); }

void AsyncControl::start_call(Completion<Answer> handler, const std::shared_ptr<AsyncControlState>& state,
                              std::string method, json::object params,
                              std::optional<std::chrono::milliseconds> deadline) {
    const Clock::time_point until = deadline_in(deadline.value_or(limits::call));
    spawn<Answer>(state->executor(), state->call(std::move(method), std::move(params), until), std::move(handler),
                  state);
}

void AsyncControl::start_next_event(Completion<json::object> handler, const std::shared_ptr<AsyncControlState>& state,
                                    std::vector<std::string> models) {
    spawn<json::object>(state->executor(), state->next_event(std::move(models)), std::move(handler), state);
}

}  // namespace bulkhead

#include "bulkhead/control.h"

#include <algorithm>
#include <cstdlib>
#include <thread>
#include <utility>

#include "clients/cpp/base/limits.h"
#include "clients/cpp/control/control_connection.h"
#include "clients/cpp/control/control_rules.h"

namespace bulkhead {
namespace json = boost::json;
using control::Repeat;

std::filesystem::path find_socket(const std::optional<std::filesystem::path>& given) {
    const auto variable = [](const char* name) {
        const char* value = std::getenv(name);
        return std::string{value == nullptr ? "" : value};
    };
    if (given) return *given;
    if (const std::string named = variable("BULKHEAD_SOCKET"); !named.empty()) return named;
    if (const std::string runtime = variable("XDG_RUNTIME_DIR"); !runtime.empty())
        return std::filesystem::path{runtime} / "bulkhead" / "control.sock";
    return "/run/bulkhead/control.sock";
}

Result<ControlClient> ControlClient::connect(const std::filesystem::path& socket) {
    Result<ControlConnection> connection = ControlConnection::connect(socket);
    if (!connection) return std::move(connection).error();
    return ControlClient{socket, std::move(*connection)};
}

ControlClient::ControlClient(std::filesystem::path path, ControlConnection connection)
    : path_{std::move(path)}, connection_{std::make_unique<ControlConnection>(std::move(connection))} {}
ControlClient::ControlClient(ControlClient&&) noexcept = default;
ControlClient& ControlClient::operator=(ControlClient&&) noexcept = default;
ControlClient::~ControlClient() = default;

int ControlClient::fd() const noexcept { return connection_ ? connection_->fd() : -1; }

Result<Answer> ControlClient::call(std::string_view method, json::object params,
                                   std::optional<std::chrono::milliseconds> deadline) {
    const Clock::time_point until = deadline_in(deadline.value_or(limits::call));
    const Repeat repeat = control::repeat_of(method);
    const Clock::time_point asked = Clock::now();
    const json::object first = params;
    for (bool was_sent = false;;) {
        if (!connection_) {
            if (const Result<> connected = reconnect(until); !connected) {
                if (was_sent && repeat == Repeat::to_end && connected.error().code == ErrorCode::not_running)
                    return Answer{control::stopped_without_receipts(), {}};
                return Error{connected.error()}.during(method);
            }
            if (!connection_) continue;  // it ended while `reconnected_` used it
            params = control::params_again(first, Clock::now() - asked, was_sent && repeat == Repeat::marked);
        }
        bool left = false;
        Result<std::optional<json::object>> answer = exchange(method, params, until, left);
        if (!answer) {
            auto hang =
                answer.error().code == ErrorCode::deadline_exceeded ? control::hang_of_supervisor(path_) : std::nullopt;
            return (hang ? std::move(*hang) : std::move(answer).error()).during(method);
        }
        if (*answer) {
            const bool refused = (*answer)->contains("error");
            Result<Answer> taken = control::answer_from(std::move(**answer), *connection_, error_data_);
            if (taken || refused) return taken;
            if (taken.error().code == ErrorCode::protocol_violation) connection_.reset();
            return std::move(taken).error().during(method);
        }
        was_sent = was_sent || left;
        if (left && repeat == Repeat::never) return control::lost_answer(method);
    }
}

Result<std::optional<json::object>> ControlClient::exchange(std::string_view method, const json::object& params,
                                                            Clock::time_point until, bool& left) {
    const std::int64_t id = ++last_id_;
    const Result<std::string> line = control::request_line(id, method, params);
    if (!line) return line.error();
    const Result<bool> sent = connection_->send(*line, until);
    if (!sent || !*sent) connection_.reset();
    if (!sent) return sent.error();
    if (!*sent) return std::nullopt;
    left = true;
    for (;;) {
        Result<std::optional<json::object>> object = receive(until);
        if (!object) connection_.reset();  // no call awaits a later answer
        if (!object || !*object) return object;
        const json::value* answered = (*object)->if_contains("id");
        if (answered == nullptr) continue;
        // An error with a null id answers a request that the daemon could not read: this call's,
        // as the only one.
        if (*answered == id || (answered->is_null() && (*object)->contains("error"))) return object;
    }
}

/// Whether a supervisor answers on this connection; false if it ended. Errors  the supervisor's
/// refusal of the connection, such as too many connections
Result<bool> ControlClient::ping(Clock::time_point until) {
    bool left = false;
    const Result<std::optional<json::object>> answer = exchange("daemon.ping", {}, until, left);
    if (!answer) return answer.error();
    if (!*answer) return false;
    const json::value* error = (*answer)->if_contains("error");
    if (error != nullptr && (*answer)->at("id").is_null()) return control::error_from(*error, error_data_);
    return true;
}

/// Connects until a supervisor answers. A keeper alone accepts connections too: they wait
/// in its backlog.
Result<> ControlClient::reconnect(Clock::time_point until) {
    const Clock::time_point start = Clock::now();
    const Clock::time_point patience = std::min(until, deadline_in(limits::absence));
    for (auto pause = limits::reconnect_pause;; pause = std::min(2 * pause, limits::reconnect_pause_max)) {
        Result<ControlConnection> connection = ControlConnection::connect(path_);
        if (connection) {
            connection_ = std::make_unique<ControlConnection>(std::move(*connection));
            const Result<bool> alive = ping(patience);
            if (alive && *alive) break;
            connection_.reset();
            if (!alive && alive.error().code != ErrorCode::deadline_exceeded) return alive.error();
        } else if (connection.error().code != ErrorCode::deadline_exceeded) {
            // That means a full backlog.
            return std::move(connection).error();
        }
        if (Clock::now() >= patience) {
            if (auto hang = control::hang_of_supervisor(path_)) return std::move(*hang);
            return control::no_supervisor(Clock::now() - start);
        }
        std::this_thread::sleep_for(std::min<Clock::duration>(pause, patience - Clock::now()));
    }
    if (!reconnected_ || std::exchange(telling_, true)) return {};
    reconnected_();
    telling_ = false;
    return {};
}

Result<> ControlClient::wait_notification(std::optional<std::chrono::milliseconds> deadline) {
    std::optional<Clock::time_point> until;
    if (deadline) until = deadline_in(*deadline);
    for (;;) {
        if (!connection_)
            return Error{ErrorCode::not_running,
                         "waiting for a notification: the connection to the supervisor has ended", "subscribe again"};
        const Result<std::optional<json::object>> object = receive(until);
        if (!object) return object.error();
        if (*object && !(*object)->contains("id")) return {};
    }
}

/// Reads one line; has passed a notification to its handler before it returns it. At the
/// connection's end, returns nothing and drops the connection. A deadline that passes ends nothing.
Result<std::optional<json::object>> ControlClient::receive(std::optional<Clock::time_point> until) {
    Result<std::optional<json::object>> object = connection_->receive(until);
    if (!object && object.error().code == ErrorCode::deadline_exceeded) return object;
    if (!object || !*object) {
        connection_.reset();
        return object;
    }
    const json::value* method = (*object)->if_contains("method");
    if (!(*object)->contains("id") && method != nullptr && method->is_string() && notify_) {
        const json::value* params = (*object)->if_contains("params");
        notify_(method->get_string(), params != nullptr && params->is_object() ? params->get_object() : json::object{});
    }
    return object;
}

}  // namespace bulkhead

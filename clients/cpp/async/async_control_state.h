#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include <boost/asio/any_io_executor.hpp>
#include <boost/asio/awaitable.hpp>
#include <boost/asio/posix/stream_descriptor.hpp>

#include "bulkhead/control.h"
#include "clients/cpp/async/signal.h"
#include "clients/cpp/control/control_connection.h"
#include "clients/cpp/control/event_queue.h"

namespace bulkhead {

/// The connection of an `AsyncControl` and the operations that wait on it: coroutines of one
/// executor, each of which holds this object.
class AsyncControlState : public std::enable_shared_from_this<AsyncControlState> {
public:
    template <typename T>
    using Awaitable = boost::asio::awaitable<T>;

    AsyncControlState(boost::asio::any_io_executor executor, std::filesystem::path path)
        : executor_{std::move(executor)}, path_{std::move(path)} {}

    Awaitable<Result<Answer>> call(std::string method, boost::json::object params, Clock::time_point until);
    Awaitable<Result<boost::json::object>> next_event(std::vector<std::string> models);
    /// Ends all open operations with `cancelled`.
    void close();

    [[nodiscard]] const boost::asio::any_io_executor& executor() const noexcept { return executor_; }
    [[nodiscard]] const std::filesystem::path& path() const noexcept { return path_; }

private:
    struct Connection;
    /// One request on a connection.
    struct Exchange {
        std::optional<Result<Answer>> answer;
        std::uint64_t end_of_line = 0;  ///< position in the bytes sent on its connection
        enum class Lost : std::uint8_t { no, unread, maybe_read };
        Lost lost = Lost::no;  ///< the connection ended first; may the daemon have read
                               ///< the whole line?
        Signal changed;
    };

    Awaitable<void> exchange(std::shared_ptr<Connection> connection, std::string_view method,
                             const boost::json::object& params, Clock::time_point until, Exchange& result);
    Awaitable<Result<>> connect(Clock::time_point until);
    Awaitable<Result<>> connect_and_ping(Clock::time_point until);
    Awaitable<std::optional<Error>> hang();
    Awaitable<Result<>> resume_events();
    /// Reads while an operation waits: an idle client must not keep a loop running.
    void keep_reading(const std::shared_ptr<Connection>& connection);
    [[nodiscard]] bool is_read(const Connection& connection) const noexcept;
    static Awaitable<void> read(std::shared_ptr<AsyncControlState> self, std::shared_ptr<Connection> connection);
    static Awaitable<void> write(std::shared_ptr<AsyncControlState> self, std::shared_ptr<Connection> connection);
    void take(Connection& connection, boost::json::object object);
    void end(Connection& connection, const std::optional<Error>& reason = {});

    boost::asio::any_io_executor executor_;
    std::filesystem::path path_;
    std::shared_ptr<Connection> connection_;  ///< null at first and after its end
    bool was_connected_ = false;
    bool connecting_ = false;  ///< one coroutine connects; the others wait
    bool closed_ = false;
    Signal changed_;  ///< for connecting_, connection_, closed_, queue_

    std::optional<std::vector<std::string>> subscribed_to_;
    std::shared_ptr<Connection> subscribed_on_;
    int event_readers_ = 0;
    struct Running {};
    /// Of the subscription. An error is for the operation that now waits for an event.
    std::variant<std::monostate, Running, Error> resume_;
    EventQueue queue_;
};

}  // namespace bulkhead

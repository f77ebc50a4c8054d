#pragma once

#include <chrono>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <boost/asio/any_io_executor.hpp>
#include <boost/asio/async_result.hpp>
#include <boost/json.hpp>

#include "bulkhead/completion.h"
#include "bulkhead/control.h"
#include "ipc/base/error.h"

namespace bulkhead {

class AsyncControlState;

/// `ControlClient` for programs with an Asio loop. Runs any number of calls at a time, each with
/// its own completion token (a callback, `use_awaitable`, `use_future`, `deferred`, …), which gets
/// a `Result`. It survives supervisor restarts by the rules of docs/control.md. A cancelled
/// operation ends with `cancelled`; if the daemon has already read the request, it still executes
/// it.
///
/// Owns    the connection, opened by the first call. Dropping it ends open operations with
///         `cancelled`
/// Thread  operations start on any thread; the rest runs on the executor: one thread, or a strand
class AsyncControl {
public:
    explicit AsyncControl(boost::asio::any_io_executor executor, std::filesystem::path socket = find_socket());
    AsyncControl(AsyncControl&&) noexcept;
    AsyncControl& operator=(AsyncControl&&) noexcept;
    ~AsyncControl();

    /// Completes with Result<Answer>. Errors  as `ControlClient::call`
    template <typename Token>
    auto async_call(std::string method, boost::json::object params, std::optional<std::chrono::milliseconds> deadline,
                    Token&& token) {
        return boost::asio::async_initiate<Token, void(Result<Answer>)>(&start_call, token, state_, std::move(method),
                                                                        std::move(params), deadline);
    }
    template <typename Token>
    auto async_call(std::string method, boost::json::object params, Token&& token) {
        return async_call(std::move(method), std::move(params), std::nullopt, std::forward<Token>(token));
    }

    /// Completes with Result<boost::json::object>: the next event (docs/control.md) of `models`, or
    /// of all models if it is empty. The first call subscribes; later ones pass the same models.
    /// One at a time. If events were lost, because a supervisor died or the client read too slowly,
    /// the result is a `gap` as in `EventStream::next`.
    /// Errors  as `async_call`; the next call resumes the stream, after a gap
    template <typename Token>
    auto async_next_event(std::vector<std::string> models, Token&& token) {
        return boost::asio::async_initiate<Token, void(Result<boost::json::object>)>(&start_next_event, token, state_,
                                                                                     std::move(models));
    }

    [[nodiscard]] const std::filesystem::path& path() const noexcept;
    [[nodiscard]] boost::asio::any_io_executor get_executor() const noexcept;

private:
    friend class AsyncChannel;
    [[nodiscard]] const std::shared_ptr<AsyncControlState>& share() const noexcept { return state_; }
    static void start_call(Completion<Answer> handler, const std::shared_ptr<AsyncControlState>& state,
                           std::string method, boost::json::object params,
                           std::optional<std::chrono::milliseconds> deadline);
    static void start_next_event(Completion<boost::json::object> handler,
                                 const std::shared_ptr<AsyncControlState>& state, std::vector<std::string> models);

    std::shared_ptr<AsyncControlState> state_;
};

}  // namespace bulkhead

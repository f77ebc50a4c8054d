#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include <boost/json.hpp>

#include "ipc/base/error.h"
#include "ipc/base/unique_fd.h"
#include "supervisor/base/event_bus.h"

/// JSON-RPC 2.0 as docs/control.md restricts it: one object per line, no batches,
/// parameters by name.
namespace bulkhead::supervisor::rpc {

struct Request {
    std::optional<json::value> id;  ///< empty for a notification, which gets no answer
    std::string method;
    json::object params;
};

/// A line that is not a request, answered at once.
struct Refusal {
    json::value id;  ///< null if unreadable
    int number = 0;  ///< JSON-RPC's error number
    Error error;
};

inline constexpr int not_json = -32700;
inline constexpr int no_request = -32600;
inline constexpr int no_such_method = -32601;
inline constexpr int wrong_parameters = -32602;
inline constexpr int failed = -32000;

[[nodiscard]] std::variant<Request, Refusal> parse(std::string_view line);

/// Includes the newline.
[[nodiscard]] std::string result_line(const json::value& id, json::object result);
[[nodiscard]] std::string error_line(const json::value& id, int number, const Error& error, json::object more = {});
/// Returns the JSON-RPC number for an error of a method: `input_invalid` concerns its parameters.
[[nodiscard]] int number_of(const Error& error);

// --- methods

struct Answer {
    Answer(json::object members = {}) : result{std::move(members)} {}
    json::object result;
    UniqueFd fd;  ///< sent with it, if any: then `result` has a member `fds`, 1
    /// A failure with details: `result` then goes into `error.data`, beside code,
    /// attempt and remedy.
    std::optional<Error> error{};
};

struct Peer {
    std::int64_t pid = 0;
    std::int64_t uid = 0;
    std::uint64_t connection = 0;  ///< its number
};

struct Call {
    json::object params;
    Peer peer;
    std::weak_ptr<NotificationSink> sink;
    std::function<void(Result<Answer>)> answer;  ///< call once, now or later, on the loop
    /// Called if the client leaves before its answer; empty: nothing to do.
    std::shared_ptr<std::function<void()>> client_left = std::make_shared<std::function<void()>>();
};

using Method = std::function<void(Call)>;
using MethodTable = std::map<std::string, Method, std::less<>>;

/// Makes a method that accepts only these parameters. If `run` throws an ErrorException, that
/// is the answer.
[[nodiscard]] Method method(std::initializer_list<std::string_view> parameters, Method run);

/// Returns a callback that answers the call: with the members that `tell` makes of the value, or
/// with its error.
template <typename Value, typename Tell>
auto answer_of(Call& call, Tell tell) {
    return [answer = std::move(call.answer), tell = std::move(tell)](Result<Value> value) {
        value ? answer(tell(std::move(*value))) : answer(std::move(value.error()));
    };
}

// --- parameters; all throw ErrorException: input_invalid, with the name of the parameter

[[nodiscard]] std::string required_string(const json::object& params, std::string_view name);
[[nodiscard]] std::optional<std::uint64_t> optional_count(const json::object& params, std::string_view name,
                                                          std::uint64_t max);
[[nodiscard]] bool flag(const json::object& params, std::string_view name, bool otherwise = false);
/// A list of strings without duplicates; empty if absent.
[[nodiscard]] std::optional<std::vector<std::string>> optional_strings(const json::object& params,
                                                                       std::string_view name);

}  // namespace bulkhead::supervisor::rpc

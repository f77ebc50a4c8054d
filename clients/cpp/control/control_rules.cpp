#include "clients/cpp/control/control_rules.h"

#include <algorithm>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "clients/cpp/base/limits.h"
#include "clients/cpp/base/protocol_violation.h"
#include "ipc/base/json_codec.h"

namespace bulkhead::control {

namespace json = boost::json;
using std::chrono::milliseconds;

namespace {

std::string text_member(const json::object& object, std::string_view key) {
    return json_codec::member<std::string>(object, key).value_or("");
}

}  // namespace

Repeat repeat_of(std::string_view method) {
    const auto found = std::ranges::find(methods, method, [](const auto& one) { return one.first; });
    return found != methods.end() ? found->second : Repeat::never;
}

Result<std::string> request_line(std::int64_t id, std::string_view method, const json::object& params) {
    json::object request{{"jsonrpc", "2.0"}, {"id", id}, {"method", method}};
    if (!params.empty()) request["params"] = params;
    std::string line = json::serialize(request) + "\n";
    if (line.size() > limits::request_bytes_max)
        return Error{ErrorCode::input_invalid, fmt::format("a request of {} bytes", line.size()),
                     fmt::format("send at most {} bytes", limits::request_bytes_max)};
    return line;
}

json::object params_again(const json::object& first, std::chrono::steady_clock::duration passed, bool marked) {
    json::object params = first;
    if (json::value* deadline = params.if_contains("deadline_ms"); deadline != nullptr && deadline->is_number()) {
        const auto left =
            deadline->to_number<std::int64_t>() - std::chrono::duration_cast<milliseconds>(passed).count();
        *deadline = std::max<std::int64_t>(left, 1);
    }
    if (marked) params["again"] = true;
    return params;
}

Error error_from(const json::value& answer, json::object& data) {
    data = {};
    if (!answer.is_object()) return protocol_violation("an error that is not an object");
    const json::object& error = answer.get_object();
    const json::value* story = error.if_contains("data");
    if (story == nullptr || !story->is_object()) return {ErrorCode::internal, text_member(error, "message"), {}};
    data = story->get_object();
    return {error_code_from(text_member(data, "code")).value_or(ErrorCode::internal), text_member(data, "attempt"),
            text_member(data, "remedy")};
}

Result<Answer> answer_from(json::object object, ControlConnection& connection, json::object& error_data) {
    if (const json::value* error = object.if_contains("error")) return error_from(*error, error_data);
    Answer answer;
    if (json::value* result = object.if_contains("result")) answer.result = std::move(*result);
    const auto count =
        answer.result.is_object() ? json_codec::member<std::int64_t>(answer.result.get_object(), "fds") : std::nullopt;
    if (count.value_or(0) == 0) return answer;
    // A negative count becomes one beyond every bound.
    Result<std::vector<UniqueFd>> fds = connection.take_fds(static_cast<std::size_t>(*count));
    if (!fds) return std::move(fds).error();
    answer.fds = std::move(*fds);
    return answer;
}

Error lost_answer(std::string_view method) {
    return {ErrorCode::not_running,
            fmt::format("{}: the supervisor ended before it answered; whether it was done is not known", method),
            "look at `bulkhead ps` and `bulkhead info`, then ask again"};
}

Error no_supervisor(std::chrono::steady_clock::duration waited) {
    return {ErrorCode::deadline_exceeded,
            fmt::format("waiting for a new supervisor: none has answered since {} ms",
                        std::chrono::floor<milliseconds>(waited).count()),
            "the keeper starts one: see logs/ beside the control socket. Workers run on meanwhile"};
}

json::value stopped_without_receipts() { return {{"receipts", json::array{}}, {"receipts_lost", true}}; }

}  // namespace bulkhead::control

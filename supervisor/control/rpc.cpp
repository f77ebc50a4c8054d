#include "supervisor/control/rpc.h"

#include <algorithm>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "supervisor/base/json_members.h"
#include "supervisor/base/text.h"

namespace bulkhead::supervisor::rpc {
namespace {

constexpr std::string_view see_docs = "send one JSON-RPC 2.0 object a line, as docs/control.md says";

Error invalid(std::string attempt, std::string remedy) {
    return {ErrorCode::input_invalid, std::move(attempt), std::move(remedy)};
}

std::string_view kind_of(const json::value& value) {
    switch (value.kind()) {
    case json::kind::null: return "null";
    case json::kind::bool_: return "a boolean";
    case json::kind::int64:
    case json::kind::uint64:
    case json::kind::double_: return "a number";
    case json::kind::string: return "a string";
    case json::kind::array: return "an array";
    case json::kind::object: return "an object";
    }
    return "unknown";
}

}  // namespace

std::variant<Request, Refusal> parse(std::string_view line) {
    const auto refuse = [](int number, std::string attempt, json::value id = nullptr) {
        return Refusal{
            std::move(id), number, {ErrorCode::protocol_violation, std::move(attempt), std::string{see_docs}}};
    };
    boost::system::error_code ec;
    json::value document = json::parse(line, ec);
    if (ec) return refuse(not_json, fmt::format("reading a request that is not JSON: {}", ec.message()));
    if (document.is_array()) return refuse(no_request, "reading a request: batches are not answered");
    if (!document.is_object())
        return refuse(no_request, fmt::format("reading a request: {} instead of an object", kind_of(document)));
    json::object& object = document.get_object();

    Request request;
    if (const json::value* id = object.if_contains("id")) {
        // Accepts only numbers that are echoed exactly: a double might be written differently.
        if (!id->is_string() && !id->is_int64() && !id->is_uint64() && !id->is_null())
            return refuse(no_request, fmt::format("reading a request: its id is {}, not a string or a 64-bit integer",
                                                  kind_of(*id)));
        request.id = *id;
    }
    const json::value id = request.id.value_or(nullptr);
    if (member<std::string>(object, "jsonrpc") != "2.0")
        return refuse(no_request, "reading a request: no \"jsonrpc\": \"2.0\"", id);
    const auto method = member<std::string>(object, "method");
    if (!method) return refuse(no_request, "reading a request: no method", id);
    request.method = *method;
    if (json::value* params = object.if_contains("params")) {
        if (!params->is_object())
            return Refusal{id, wrong_parameters,
                           invalid(fmt::format("calling {}: params is {}", escaped(*method), kind_of(*params)),
                                   "give parameters by name, in an object")};
        request.params = std::move(params->get_object());
    }
    return request;
}

std::string result_line(const json::value& id, json::object result) {
    return json::serialize(json::object{{"jsonrpc", "2.0"}, {"id", id}, {"result", std::move(result)}}) + "\n";
}

std::string error_line(const json::value& id, int number, const Error& error, json::object more) {
    json::object data{{"code", to_string(error.code)}, {"attempt", error.attempt}, {"remedy", error.remedy}};
    for (auto& [name, value] : more) data.emplace(name, std::move(value));
    const json::object member{{"code", number}, {"message", error.text()}, {"data", data}};
    return json::serialize(json::object{{"jsonrpc", "2.0"}, {"id", id}, {"error", member}}) + "\n";
}

int number_of(const Error& error) { return error.code == ErrorCode::input_invalid ? wrong_parameters : failed; }

Method method(std::initializer_list<std::string_view> parameters, Method run) {
    return [known = std::vector(parameters), run = std::move(run)](Call call) {
        const auto answer = call.answer;
        try {
            for (const auto& [name, value] : call.params)
                if (std::ranges::find(known, std::string_view{name}) == known.end())
                    throw ErrorException{invalid(
                        fmt::format("unknown parameter \"{}\"", escaped(name)),
                        known.empty() ? "this method has none" : fmt::format("there is {}", fmt::join(known, ", ")))};
            run(std::move(call));
        } catch (const ErrorException& refused) {
            answer(refused.error());
        }
    };
}

std::string required_string(const json::object& params, std::string_view name) {
    if (auto value = member<std::string>(params, name)) return std::move(*value);
    throw ErrorException{
        invalid(fmt::format("parameter \"{}\" is missing or not a string", name), "give it as a string")};
}

std::optional<std::uint64_t> optional_count(const json::object& params, std::string_view name, std::uint64_t max) {
    if (!params.contains(name)) return std::nullopt;
    const auto value = member<std::uint64_t>(params, name);
    if (value && *value <= max) return value;
    throw ErrorException{
        invalid(fmt::format("parameter \"{}\" is {}", name, escaped(json::serialize(params.at(name)).substr(0, 64))),
                fmt::format("give a whole number from 0 to {}", max))};
}

bool flag(const json::object& params, std::string_view name, bool otherwise) {
    const json::value* value = params.if_contains(name);
    if (value == nullptr) return otherwise;
    if (value->is_bool()) return value->get_bool();
    throw ErrorException{
        invalid(fmt::format("parameter \"{}\" is {}", name, kind_of(*value)), "give true or false")};
}

std::optional<std::vector<std::string>> optional_strings(const json::object& params, std::string_view name) {
    const json::value* value = params.if_contains(name);
    if (value == nullptr) return std::nullopt;
    const ErrorException wrong{
        invalid(fmt::format("parameter \"{}\" is not a list of strings", name), "give [\"A\", \"B\"]")};
    if (!value->is_array() || value->get_array().empty()) throw wrong;
    std::vector<std::string> strings;
    for (const json::value& one : value->get_array()) {
        if (!one.is_string()) throw wrong;
        const std::string text{one.get_string()};
        if (std::ranges::find(strings, text) == strings.end()) strings.push_back(text);
    }
    return strings;
}

}  // namespace bulkhead::supervisor::rpc

#include "ipc/links/worker_link.h"

#include <concepts>
#include <type_traits>
#include <utility>

#include <fmt/format.h>

#include "ipc/base/packet.h"

namespace bulkhead::worker_link {

static_assert(packet_bytes_max == bulkhead::packet_bytes_max && packet_fds_max == packet_fds_kernel_max);

Error violation(std::string_view what) {
    return Error{ErrorCode::protocol_violation, fmt::format("worker link: {}", what), "see docs/worker-link.md"};
}

namespace {

namespace json = boost::json;

template <typename T>
constexpr bool is_optional = false;
template <typename T>
constexpr bool is_optional<std::optional<T>> = true;
template <typename T>
concept Struct = requires(T value) {
    T::members(value, [](auto&&...) {});
};
template <typename T>
concept List = requires(T value) {
    value.begin();
}
&&!std::same_as<T, std::string> && !std::same_as<T, json::object>;

template <Struct T>
json::object encode_members(T& from, json::object to = {}) {
    const auto encode = [](const auto& self, auto& value) -> json::value {
        using Value = std::remove_reference_t<decltype(value)>;
        if constexpr (Struct<Value>) {
            return encode_members(value);
        } else if constexpr (List<Value>) {
            json::array list;
            for (auto& item : value) list.push_back(self(self, item));
            return list;
        } else {
            return json::value(std::move(value));
        }
    };
    T::members(from, [&](std::string_view name, auto& value, bool) {
        if constexpr (is_optional<std::remove_reference_t<decltype(value)>>) {
            if (value) to[name] = encode(encode, *value);
        } else {
            to[name] = encode(encode, value);
        }
    });
    return to;
}

template <typename Direction>
json::object encode_message(Direction& message) {
    return std::visit(
        []<typename Message>(Message& from) -> json::object {
            if constexpr (std::is_same_v<Message, Unknown>)
                return {{"type", from.type}};
            else
                return encode_members(from, {{"type", Message::type}});
        },
        message);
}

/// Returns false and leaves `to` empty if `from` has another type.
template <typename T>
bool decode(json::value& from, T& to) {
    if constexpr (is_optional<T>) {
        if (!decode(from, to.emplace())) to.reset();
        return to.has_value();
    } else if constexpr (Struct<T>) {
        if (!from.is_object()) return false;
        json::object& object = from.get_object();
        T::members(to, [&](std::string_view name, auto& value, bool) {
            if (json::value* member = object.if_contains(name)) (void)decode(*member, value);
        });
        return true;
    } else if constexpr (std::is_same_v<T, json::object>) {
        if (from.is_object()) to = std::move(from.get_object());
        return from.is_object();
    } else if constexpr (std::is_same_v<T, std::string>) {
        if (from.is_string()) to = from.get_string();
        return from.is_string();
    } else if constexpr (std::is_same_v<T, bool>) {
        to = from.is_bool() && from.get_bool();
        return from.is_bool();
    } else if constexpr (std::is_arithmetic_v<T>) {
        json::error_code inexact;
        const T number = from.to_number<T>(inexact);
        if (!inexact) to = number;
        return !inexact;
    } else if constexpr (requires { to.push_back({}); }) {
        if (!from.is_array()) return false;
        for (json::value& item : from.get_array())
            if (typename T::value_type value{}; decode(item, value)) to.push_back(std::move(value));
        return true;
    } else {
        if (!from.is_array() || from.get_array().size() != to.size()) return false;
        for (std::size_t i = 0; i < to.size(); ++i)
            if (!decode(from.get_array()[i], to[i])) return false;
        return true;
    }
}

template <typename Message>
Result<Message> decode_message(json::object& from) {
    Message message;
    std::string_view missing;
    Message::members(message, [&](std::string_view name, auto& value, bool required) {
        json::value* member = from.if_contains(name);
        const bool ok = member != nullptr && decode(*member, value);
        if (required && !ok && missing.empty()) missing = name;
    });
    if (!missing.empty()) return violation(fmt::format("{} without {}", Message::type, missing));
    return message;
}

template <typename Direction>
struct Parser;
template <typename... Message>
struct Parser<std::variant<Message...>> {
    using Direction = std::variant<Message...>;

    static Result<Direction> parse(std::string_view packet) {
        json::error_code failure;
        json::value document = json::parse(packet, failure);
        if (failure || !document.is_object()) return violation("a packet that is not a JSON object");
        json::object& object = document.get_object();
        std::string type;
        if (json::value* member = object.if_contains("type"); member == nullptr || !decode(*member, type))
            return violation("a packet without type");
        Result<Direction> parsed = Direction{Unknown{type}};
        const auto try_one = [&]<typename One>(std::type_identity<One>) {
            if constexpr (!std::is_same_v<One, Unknown>) {
                if (type != One::type) return;
                Result<One> one = decode_message<One>(object);
                parsed = one ? Result<Direction>{Direction{std::move(*one)}} : Result<Direction>{one.error()};
            }
        };
        (try_one(std::type_identity<Message>{}), ...);
        return parsed;
    }
};

}  // namespace

json::object to_json(ToDaemon message) { return encode_message(message); }
json::object to_json(ToWorker message) { return encode_message(message); }

Result<ToDaemon> parse_to_daemon(std::string_view packet) { return Parser<ToDaemon>::parse(packet); }
Result<ToWorker> parse_to_worker(std::string_view packet) { return Parser<ToWorker>::parse(packet); }

}  // namespace bulkhead::worker_link

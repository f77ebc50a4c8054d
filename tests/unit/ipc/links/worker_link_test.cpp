// Workers in other languages are written from worker_link.json: what one side writes, the other
// reads, member by member.

#include "ipc/links/worker_link.h"

#include <fstream>
#include <iterator>
#include <set>
#include <type_traits>

#include <gtest/gtest.h>

namespace bulkhead::worker_link {
namespace {

namespace json = boost::json;

json::object definition() {
    std::ifstream file{BULKHEAD_SOURCE_DIR "/ipc/links/worker_link.json"};
    return json::parse(std::string{std::istreambuf_iterator<char>{file}, {}}).as_object();
}

/// Another value for each member.
struct Filler {
    int next = 1;
    template <typename T>
    void fill(T& value) {
        if constexpr (requires { T::members(value, [](auto&&...) {}); })
            T::members(value, [this](std::string_view, auto& member, bool) { fill(member); });
        else if constexpr (std::is_same_v<T, bool>)
            value = true;
        else if constexpr (std::is_arithmetic_v<T>)
            value = static_cast<T>(next++);
        else if constexpr (std::is_same_v<T, std::string>)
            value = "text " + std::to_string(next++);
        else if constexpr (std::is_same_v<T, json::object>)
            value = {{"number", next++}, {"nested", {{"is", true}}}};
        else if constexpr (requires { value.emplace(); })
            fill(value.emplace());
        else if constexpr (requires { value.resize(2); })
            for (value.resize(2); auto& item : value) fill(item);
        else
            for (auto& item : value) fill(item);
    }
};

template <typename Direction>
Result<Direction> parsed(const json::object& packet) {
    if constexpr (std::is_same_v<Direction, ToDaemon>)
        return parse_to_daemon(json::serialize(packet));
    else
        return parse_to_worker(json::serialize(packet));
}

/// Each message of one direction: full, empty, and without each of its members.
template <typename Direction, std::size_t... i>
void check_each(const json::object& declared, std::index_sequence<i...>) {
    std::set<std::string_view> types;
    const auto check = [&]<typename Message>(std::type_identity<Message>) {
        if constexpr (!std::is_same_v<Message, Unknown>) {
            types.insert(Message::type);
            Message message;
            Filler{}.fill(message);
            const json::object packet = to_json(Direction{message});
            SCOPED_TRACE(json::serialize(packet));
            EXPECT_EQ(packet.at("type").as_string(), Message::type);
            EXPECT_EQ(std::get<Message>(parsed<Direction>(packet).value()), message);

            const json::object& spec = declared.at(Message::type).as_object();
            EXPECT_EQ(packet.size(), 1 + spec.at("members").as_array().size());
            for (const json::value& member : spec.at("members").as_array()) {
                const json::string& name = member.at(0).as_string();
                EXPECT_TRUE(packet.contains(name)) << name;
                const json::array* required = spec.contains("required") ? &spec.at("required").as_array() : nullptr;
                const bool is_required = required && std::ranges::find(*required, json::value(name)) != required->end();
                json::object without = packet, of_another_type = packet;
                without.erase(name);
                of_another_type[name] = nullptr;
                EXPECT_EQ(parsed<Direction>(without).has_error(), is_required) << name;
                EXPECT_EQ(parsed<Direction>(of_another_type).has_error(), is_required) << name;
            }
        }
    };
    (check(std::type_identity<std::variant_alternative_t<i, Direction>>{}), ...);
    EXPECT_EQ(types.size(), declared.size());
}

TEST(WorkerLink, EachMessageIsReadAsItWasWritten) {
    const json::object all = definition();
    check_each<ToDaemon>(all.at("to_daemon").as_object(), std::make_index_sequence<std::variant_size_v<ToDaemon>>{});
    check_each<ToWorker>(all.at("to_worker").as_object(), std::make_index_sequence<std::variant_size_v<ToWorker>>{});
}

TEST(WorkerLink, MembersThatMayBeAbsentAreNotWritten) {
    EXPECT_EQ(json::serialize(to_json(ToWorker{HelloAsked{}})), R"({"type":"hello_asked"})");
    EXPECT_EQ(std::get<HelloAsked>(parse_to_worker(R"({"type":"hello_asked","nonce":-1})").value()).nonce,
              std::nullopt);
}

TEST(WorkerLink, UnknownTypesAndMembersAreLeftToTheReader) {
    EXPECT_EQ(std::get<Unknown>(parse_to_worker(R"({"type":"later","x":1})").value()).type, "later");
    EXPECT_TRUE(std::holds_alternative<Unknown>(parse_to_worker(R"({"type":"ready"})").value())) << "of the other side";
    EXPECT_TRUE(std::holds_alternative<Grant>(parse_to_worker(R"({"type":"grant","later":[]})").value()));
}

TEST(WorkerLink, ListsKeepTheItemsThatAreOfTheirType) {
    const auto hello = parse_to_daemon(
        R"({"type":"hello","protocol":[1,2],"model":"m","replica":0,"generation":7,"channels":[1,"2",-3,4]})");
    EXPECT_EQ(std::get<Hello>(hello.value()).channels, (std::vector<std::uint64_t>{1, 4}));
    for (const char* protocol : {"1", "[1]", "[1,2,3]", R"(["1",2])", "null"})
        EXPECT_TRUE(
            parse_to_daemon(std::string{R"({"type":"hello","model":"m","replica":0,"generation":7,"protocol":)"} +
                            protocol + "}")
                .has_error())
            << protocol;
}

TEST(WorkerLink, WhatIsNotAMessageIsRefused) {
    for (const char* packet : {"", "{", "[]", "null", "{}", R"({"type":1})", R"({"type":"drain"})",
                               R"({"type":"drain","deadline_ms":4294967296})", R"({"type":"drain","deadline_ms":-1})"})
        EXPECT_EQ(parse_to_worker(packet).error().code, ErrorCode::protocol_violation) << packet;
}

}  // namespace
}  // namespace bulkhead::worker_link

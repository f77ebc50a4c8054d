#include "supervisor/replica/worker_link.h"

#include <limits>

#include <fmt/format.h>

#include "config/fleet_json.h"
#include "supervisor/base/json_members.h"
#include "supervisor/base/limits.h"
#include "supervisor/base/text.h"

namespace bulkhead::supervisor::worker_link {
namespace {

Error violation(std::string attempt) {
    return {ErrorCode::protocol_violation, "worker link: " + std::move(attempt), "see docs/worker-link.md"};
}

std::string text_or_empty(const json::object& object, std::string_view name) {
    return escaped(string_member(object, name).value_or(""));
}
std::uint64_t number_or_zero(const json::object& object, std::string_view name) {
    return unsigned_member(object, name).value_or(0);
}

Error error_of(const json::object& object) {
    const auto code = error_code_from(std::string_view{string_member(object, "code").value_or("")});
    return {code.value_or(ErrorCode::internal), text_or_empty(object, "attempt"), text_or_empty(object, "remedy")};
}

Ready ready_of(const json::object& object) {
    return {number_member(object, "load_ms").value_or(0), text_or_empty(object, "torch"),
            text_or_empty(object, "device"), object_member(object, "graphs")};
}

Result<Message> parse_hello(const json::object& object) {
    const json::value* protocol = object.if_contains("protocol");
    if (protocol == nullptr || !protocol->is_array() || protocol->get_array().size() != 2)
        return violation("hello without protocol: [lowest, highest]");
    const json::object range{{"lowest", protocol->get_array()[0]}, {"highest", protocol->get_array()[1]}};
    const auto model = string_member(object, "model");
    const auto replica = unsigned_member(object, "replica");
    const auto generation = unsigned_member(object, "generation");
    if (!model || !replica || !generation) return violation("hello without model, replica and generation");
    Hello hello;
    hello.protocol_min = number_or_zero(range, "lowest");
    hello.protocol_max = number_or_zero(range, "highest");
    hello.name = {*model, static_cast<std::uint32_t>(*replica), *generation};
    hello.pid = static_cast<std::int64_t>(number_or_zero(object, "pid"));
    hello.nonce = number_or_zero(object, "nonce");
    const json::object state = object_member(object, "state");
    const json::value* configured = state.if_contains("configured");
    hello.configured = configured != nullptr && configured->is_bool() && configured->get_bool();
    hello.phase = text_or_empty(state, "phase");
    hello.in_flight = number_or_zero(state, "in_flight");
    hello.grant = text_or_empty(state, "grant");
    if (object.contains("loaded")) hello.loaded = ready_of(object_member(object, "loaded"));
    if (const json::value* channels = object.if_contains("channels"); channels != nullptr && channels->is_array())
        for (const json::value& id : channels->get_array()) {
            boost::system::error_code ec;
            const auto number = id.to_number<std::uint64_t>(ec);
            if (!ec) hello.channels.push_back(number);
        }
    const json::value* page = object.if_contains("page");
    hello.has_page = page != nullptr && page->is_bool() && page->get_bool();
    return Message{std::move(hello)};
}

Backtrace parse_backtrace(const json::object& object) {
    Backtrace backtrace{static_cast<int>(number_or_zero(object, "signal")),
                        text_or_empty(object, "thread").substr(0, limits::crash_frame_bytes_max),
                        {}};
    if (const json::value* frames = object.if_contains("frames"); frames != nullptr && frames->is_array())
        for (const json::value& frame : frames->get_array()) {
            if (backtrace.frames.size() == limits::crash_frames_max) break;
            if (!frame.is_string()) continue;
            const std::string_view text{frame.get_string()};
            backtrace.frames.push_back(escaped(text.substr(0, limits::crash_frame_bytes_max)));
        }
    return backtrace;
}

std::vector<Importer> importers_of(const json::object& object) {
    std::vector<Importer> importers;
    const json::value* list = object.if_contains("importers");
    if (list == nullptr || !list->is_array()) return importers;
    for (const json::value& entry : list->get_array()) {
        if (importers.size() == limits::importers_max || !entry.is_object()) break;
        const auto pid = number_or_zero(entry.get_object(), "pid");
        if (pid > 0 && pid <= static_cast<std::uint64_t>(std::numeric_limits<pid_t>::max()))
            importers.push_back({static_cast<std::int64_t>(pid), number_or_zero(entry.get_object(), "bytes")});
    }
    return importers;
}

}  // namespace

std::string Progress::text() const {
    if (total == 0) return phase;
    return unit == "bytes" ? fmt::format("{}, {} of {}", phase, bytes_text(done), bytes_text(total))
                           : fmt::format("{}, {} of {} {}", phase, done, total, unit);
}

Result<Message> parse(std::string_view packet) {
    boost::system::error_code ec;
    const json::value document = json::parse(packet, ec);
    if (ec || !document.is_object()) return violation("a packet that is no JSON object");
    const json::object& object = document.get_object();
    const auto type = string_member(object, "type");
    if (!type) return violation("a packet without type");
    const auto number = [&](std::string_view name) { return number_or_zero(object, name); };

    if (*type == "hello") return parse_hello(object);
    if (*type == "progress")
        return Message{Progress{text_or_empty(object, "phase"), number("done"), number("total"),
                                text_or_empty(object, "unit"), text_or_empty(object, "detail")}};
    if (*type == "grant_asked") return Message{GrantAsked{number("device_bytes")}};
    if (*type == "ready") return Message{ready_of(object)};
    if (*type == "failed") return Message{Failed{error_of(object)}};
    if (*type == "channel_opened") return Message{ChannelOpened{number("channel")}};
    if (*type == "channel_closed") return Message{ChannelClosed{number("channel")}};
    if (*type == "channel_refused") return Message{ChannelRefused{number("channel"), error_of(object)}};
    if (*type == "busy") return Message{Busy{}};
    if (*type == "idle") return Message{Idle{}};
    if (*type == "statistics")
        return Message{Statistics{number("requests"), number("errors"), number("in_flight"), number("queued"),
                                  number("channels"), object_member(object, "graphs"), number("ignored_frames"),
                                  importers_of(object), object_member(object, "generation")}};
    if (*type == "overrun")
        return Message{Overrun{text_or_empty(object, "method"), number("running_ms"), number("budget_ms")}};
    if (*type == "drained") return Message{Drained{}};
    if (*type == "dying") return Message{Dying{static_cast<int>(number("signal"))}};
    if (*type == "backtrace") return Message{parse_backtrace(object)};
    return Message{Unknown{escaped(type->substr(0, 64))}};
}

std::string configure(const config::ModelSpec& model, bool cuda) {
    return json::serialize(json::object{{"type", "configure"},
                                        {"model", config::to_json(model)},
                                        {"device", cuda ? "cuda" : "cpu"},
                                        {"protocol", version_max}});
}

std::string grant() { return R"({"type":"grant"})"; }

std::string channel(std::uint64_t id, std::int64_t client_pid, std::int64_t client_uid) {
    return json::serialize(
        json::object{{"type", "channel"}, {"channel", id}, {"client_pid", client_pid}, {"client_uid", client_uid}});
}

std::string drain(std::chrono::milliseconds deadline) {
    return json::serialize(json::object{{"type", "drain"}, {"deadline_ms", deadline.count()}});
}

std::string hello_asked(std::uint64_t nonce) {
    return json::serialize(json::object{{"type", "hello_asked"}, {"nonce", nonce}});
}

std::string statistics_asked() { return R"({"type":"statistics_asked"})"; }

}  // namespace bulkhead::supervisor::worker_link

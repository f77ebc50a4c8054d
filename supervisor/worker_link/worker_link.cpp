#include "supervisor/worker_link/worker_link.h"

#include <algorithm>
#include <limits>

#include <fmt/format.h>

#include "config/fleet_json.h"
#include "supervisor/base/limits.h"
#include "supervisor/base/text.h"

namespace bulkhead::supervisor::worker_link {
namespace {

/// Escapes each text of a message and bounds its size.
template <typename T>
void make_safe(T& value) {
    if constexpr (std::is_same_v<T, std::string>) {
        value = escaped(value);
    } else if constexpr (requires { T::members(value, [](auto&&...) {}); }) {
        T::members(value, [](std::string_view, auto& member, bool) { make_safe(member); });
    } else if constexpr (std::is_same_v<T, std::optional<Ready>>) {
        if (value) make_safe(*value);
    } else if constexpr (std::is_same_v<T, std::vector<std::string>>) {
        if (value.size() > limits::crash_frames_max) value.resize(limits::crash_frames_max);
        for (std::string& text : value) text = escaped(std::string_view{text}.substr(0, limits::crash_frame_bytes_max));
    } else if constexpr (std::is_same_v<T, std::vector<Importer>>) {
        if (value.size() > limits::importers_max) value.resize(limits::importers_max);
        std::erase_if(value, [](const Importer& importer) {
            return importer.pid <= 0 || importer.pid > std::numeric_limits<pid_t>::max();
        });
    }
}

Message of(packets::Hello&& message) { return Hello{std::move(message)}; }
Message of(Unknown&& message) { return Unknown{escaped(std::string_view{message.type}.substr(0, 64))}; }
Message of(Backtrace&& message) {
    message.thread.resize(std::min(message.thread.size(), limits::crash_frame_bytes_max));
    return std::move(message);
}
template <typename T>
Message of(T&& message) {
    return std::forward<T>(message);
}

}  // namespace

Result<Message> parse(std::string_view packet) {
    Result<packets::ToDaemon> parsed = packets::parse_to_daemon(packet);
    if (!parsed) return parsed.error();
    return std::visit(
        [](auto& message) -> Result<Message> {
            make_safe(message);
            return of(std::move(message));
        },
        *parsed);
}

std::string text_of(const Progress& progress) {
    const auto& [phase, done, total, unit, detail] = progress;
    if (total == 0) return phase;
    return unit == "bytes" ? fmt::format("{}, {} of {}", phase, bytes_text(done), bytes_text(total))
                           : fmt::format("{}, {} of {} {}", phase, done, total, unit);
}

std::string packet_of(const packets::ToWorker& message) { return boost::json::serialize(packets::to_json(message)); }

std::string configure(const config::ModelSpec& model, const WorkerName& worker, bool cuda) {
    return packet_of(packets::Configure{config::worker_json(model), cuda ? "cuda" : "cpu", packets::version,
                                        worker.replica, worker.generation});
}

}  // namespace bulkhead::supervisor::worker_link

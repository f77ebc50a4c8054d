#include "supervisor/crash/python_traceback.h"

#include <algorithm>
#include <array>
#include <csignal>
#include <utility>

#include <fmt/format.h>

#include "supervisor/base/limits.h"
#include "supervisor/base/text.h"

namespace bulkhead::supervisor {
namespace {

constexpr std::string_view title = "Fatal Python error: ";

/// Parses `  File "/x/engine.py", line 31 in speak`; empty for any other line.
std::string frame_of(std::string_view line) {
    constexpr std::string_view file = "  File \"", number = "\", line ", function = " in ";
    if (!line.starts_with(file)) return {};
    const std::size_t number_at = line.find(number, file.size());
    if (number_at == std::string_view::npos) return {};
    const std::size_t digits = number_at + number.size();
    const std::size_t function_at = line.find(function, digits);
    if (function_at == std::string_view::npos) return {};
    const std::string_view path = line.substr(file.size(), number_at - file.size());
    std::string frame = fmt::format("{} ({}:{})", line.substr(function_at + function.size()),
                                    path.substr(path.rfind('/') + 1), line.substr(digits, function_at - digits));
    if (frame.size() > limits::crash_frame_bytes_max) frame.resize(limits::crash_frame_bytes_max);
    return escaped(frame);
}

}  // namespace

std::optional<int> fatal_signal(std::string_view line) {
    constexpr std::array<std::pair<std::string_view, int>, 6> names{{{"Segmentation fault", SIGSEGV},
                                                                     {"Aborted", SIGABRT},
                                                                     {"Bus error", SIGBUS},
                                                                     {"Floating point exception", SIGFPE},
                                                                     {"Floating-point exception", SIGFPE},
                                                                     {"Illegal instruction", SIGILL}}};
    if (!line.starts_with(title)) return std::nullopt;
    for (const auto& [name, number] : names)
        if (line.substr(title.size()) == name) return number;
    return std::nullopt;
}

std::vector<std::string> python_frames(const std::vector<std::string>& lines) {
    const auto is_current = [](const std::string& line) { return line.starts_with("Current thread 0x"); };
    std::vector<std::string> frames;
    auto line = std::ranges::find_if(lines, is_current);
    for (line += line == lines.end() ? 0 : 1; line != lines.end() && frames.size() < limits::crash_frames_max; ++line) {
        std::string frame = frame_of(*line);
        if (frame.empty()) break;
        frames.push_back(std::move(frame));
    }
    return frames;
}

}  // namespace bulkhead::supervisor

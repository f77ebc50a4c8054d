#include "supervisor/model_log.h"

#include <algorithm>
#include <ctime>

#include <fmt/chrono.h>
#include <fmt/format.h>

#include "supervisor/limits.h"

namespace bulkhead::supervisor {
namespace {

/// A model's name as a file name: nothing in it leaves the folder or hides the file.
std::string file_name(std::string_view model) {
    std::string name;
    for (const char c : model) {
        const bool plain = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' ||
                           c == '_' || (c == '.' && !name.empty());
        name += plain ? std::string{c} : fmt::format("%{:02x}", static_cast<unsigned char>(c));
    }
    return name + ".log";
}

std::string text_of(const LogLine& line) {
    const auto seconds = static_cast<std::time_t>(line.time_ms / 1'000);
    return fmt::format("{:%Y-%m-%dT%H:%M:%S}.{:03} {}#{}{} {}\n", fmt::gmtime(seconds), line.time_ms % 1'000,
                       line.replica, line.generation, line.by_daemon ? " daemon:" : "", line.text);
}

}  // namespace

ModelLog::ModelLog(std::string model, const std::optional<std::filesystem::path>& folder) : model_{std::move(model)} {
    if (folder) file_.emplace(*folder / file_name(model_));
}

void ModelLog::append(LogLine line) {
    if (file_) file_->append(text_of(line));
    if (!followers_.empty()) {
        json::object params = to_json(line);
        params["model"] = model_;
        followers_.notify("log", std::move(params));
    }
    bytes_ += line.text.size();
    lines_.push_back(std::move(line));
    while (lines_.size() > limits::log_lines_kept || bytes_ > limits::log_bytes_kept) {
        bytes_ -= lines_.front().text.size();
        lines_.pop_front();
    }
}

json::array ModelLog::tail(std::size_t lines) const {
    json::array result;
    const std::size_t first = lines_.size() - std::min(lines, lines_.size());
    std::size_t bytes = 0;
    std::size_t from = lines_.size();
    // From the end: an answer has a bound, and the last lines matter most.
    constexpr std::size_t bytes_max = limits::control_answer_bytes_max / 2;
    constexpr std::size_t member_bytes = 128;
    while (from > first && (bytes += 2 * lines_[from - 1].text.size() + member_bytes) <= bytes_max) --from;
    for (; from < lines_.size(); ++from) result.push_back(to_json(lines_[from]));
    return result;
}

std::string ModelLog::last_line(std::uint32_t replica, std::uint64_t generation) const {
    for (auto line = lines_.rbegin(); line != lines_.rend(); ++line)
        if (!line->by_daemon && line->replica == replica && line->generation == generation) return line->text;
    return {};
}

json::object ModelLog::to_json(const LogLine& line) {
    return {{"time", line.time_ms},
            {"replica", line.replica},
            {"generation", line.generation},
            {"stream", line.by_daemon ? "daemon" : "output"},
            {"text", line.text}};
}

}  // namespace bulkhead::supervisor

#include "supervisor/log/model_log.h"

#include <algorithm>
#include <cstdio>
#include <ctime>
#include <fstream>

#include <fmt/chrono.h>
#include <fmt/format.h>

#include "supervisor/base/limits.h"
#include "supervisor/base/text.h"

namespace bulkhead::supervisor {
namespace {

std::string text_of(const LogLine& line) {
    const auto seconds = static_cast<std::time_t>(line.time_ms / 1'000);
    return fmt::format("{:%Y-%m-%dT%H:%M:%S}.{:03} {}#{}{} {}\n", fmt::gmtime(seconds), line.time_ms % 1'000,
                       line.replica, line.generation, line.by_daemon ? ":daemon" : "", line.text);
}

/// The inverse of `text_of`, without the newline; empty for any other text.
std::optional<LogLine> line_of(const std::string& text) {
    std::tm date{};
    int milliseconds = 0;
    unsigned replica = 0;
    unsigned long long generation = 0;
    int end = 0;
    const int count =
        std::sscanf(text.c_str(), "%4d-%2d-%2dT%2d:%2d:%2d.%3d %u#%llu%n", &date.tm_year, &date.tm_mon, &date.tm_mday,
                    &date.tm_hour, &date.tm_min, &date.tm_sec, &milliseconds, &replica, &generation, &end);
    if (count != 9 || end == 0) return std::nullopt;
    date.tm_year -= 1900;
    date.tm_mon -= 1;
    std::string_view rest = std::string_view{text}.substr(static_cast<std::size_t>(end));
    constexpr std::string_view by_daemon = ":daemon ";
    const bool daemon = rest.starts_with(by_daemon);
    if (!daemon && !rest.starts_with(' ')) return std::nullopt;
    rest.remove_prefix(daemon ? by_daemon.size() : 1);
    return LogLine{static_cast<std::int64_t>(::timegm(&date)) * 1'000 + milliseconds, replica, generation, daemon,
                   std::string{rest}};
}

std::filesystem::path path_of(const std::filesystem::path& folder, const std::string& model) {
    return folder / (file_name(model) + ".log");
}

json::object to_json(const LogLine& line) {
    return {{"time", line.time_ms},
            {"replica", line.replica},
            {"generation", line.generation},
            {"stream", line.by_daemon ? "daemon" : "output"},
            {"text", line.text}};
}

}  // namespace

ModelLog::ModelLog(std::string model, const std::optional<LogStore>& store) : model_{std::move(model)} {
    if (!store) return;
    file_ = std::make_shared<LogFile>(path_of(store->folder, model_));
    writer_ = store->writer;
}

std::vector<LogLine> ModelLog::read_back(const std::filesystem::path& folder, const std::string& model,
                                         std::int64_t since_unix_ms) {
    std::vector<LogLine> lines;
    std::ifstream file{path_of(folder, model), std::ios::binary | std::ios::ate};
    const auto size = static_cast<std::int64_t>(file.tellg());
    if (!file || size <= 0) return lines;
    const std::int64_t from = std::max<std::int64_t>(size - static_cast<std::int64_t>(limits::log_read_back_bytes), 0);
    file.seekg(from);
    std::string text;
    if (from > 0) std::getline(file, text);  // skip the end of a line
    while (std::getline(file, text))
        if (auto line = line_of(text); line && line->time_ms >= since_unix_ms) lines.push_back(std::move(*line));
    return lines;
}

void ModelLog::restore(std::vector<LogLine> lines) {
    for (LogLine& line : lines) keep(std::move(line));
}

void ModelLog::append(LogLine line) {
    if (file_) writer_->append(file_, text_of(line));
    std::erase_if(followers_, [](const auto& one) { return one.expired(); });
    if (!followers_.empty()) {
        json::object params = to_json(line);
        params["model"] = model_;
        const std::string text = notification("log", std::move(params));
        for (const auto& weak : followers_)
            if (const auto sink = weak.lock()) sink->notify(text);
    }
    keep(std::move(line));
}

void ModelLog::keep(LogLine line) {
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
    // From the end: the size of an answer is bounded, and the last lines matter most.
    constexpr std::size_t bytes_max = limits::control_answer_bytes_max / 2;
    constexpr std::size_t member_bytes = 128;
    while (from > first && (bytes += 2 * lines_[from - 1].text.size() + member_bytes) <= bytes_max) --from;
    for (; from < lines_.size(); ++from) result.push_back(to_json(lines_[from]));
    return result;
}

std::vector<std::string> ModelLog::last_lines(std::uint32_t replica, std::uint64_t generation, std::size_t max) const {
    std::vector<std::string> texts;
    for (auto line = lines_.rbegin(); line != lines_.rend() && texts.size() < max; ++line)
        if (!line->by_daemon && line->replica == replica && line->generation == generation) texts.push_back(line->text);
    std::reverse(texts.begin(), texts.end());
    return texts;
}

std::string ModelLog::last_line(std::uint32_t replica, std::uint64_t generation) const {
    const auto lines = last_lines(replica, generation, 1);
    return lines.empty() ? std::string{} : lines.front();
}

}  // namespace bulkhead::supervisor

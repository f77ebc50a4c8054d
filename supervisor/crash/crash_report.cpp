#include "supervisor/crash/crash_report.h"

#include <cxxabi.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <csignal>
#include <cstdlib>
#include <memory>
#include <utility>

#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include "supervisor/base/json_members.h"
#include "supervisor/base/limits.h"
#include "supervisor/base/proc_files.h"
#include "supervisor/base/text.h"
#include "supervisor/reclaim/cgroup.h"
#include "supervisor/reclaim/receipt.h"

namespace bulkhead::supervisor {
namespace {

constexpr std::size_t time_digits = 13;  ///< of unix ms until the year 2286: names sort by age

bool is_report_name(std::string_view name) {
    return name.size() > time_digits && name.ends_with(".json") &&
           std::all_of(name.begin(), name.begin() + time_digits, [](char c) { return c >= '0' && c <= '9'; });
}

/// A symbol comes from the worker. Each 10 bytes of a hostile one can double its demangled size:
/// 100 bytes give at most 14 KB. Longer symbols stay as they are.
std::string demangled(const std::string& symbol) {
    if (symbol.size() > limits::crash_demangled_bytes_max) return symbol;
    int status = 0;
    const std::unique_ptr<char, void (*)(void*)> text{abi::__cxa_demangle(symbol.c_str(), nullptr, nullptr, &status),
                                                      std::free};
    return status == 0 && text ? std::string{text.get()} : symbol;
}

/// Frames of the runtime that every fault passes through: abort(), the unwinder, the return
/// from a handler.
bool is_runtime(std::string_view frame) {
    const auto library = frame.rfind(" (");
    if (library == std::string_view::npos) return false;
    const std::string_view name = frame.substr(library + 2);
    for (const std::string_view runtime :
         {"libc.so", "libc-", "libpthread", "libstdc++", "libgcc_s", "ld-linux", "linux-vdso", "libasan", "libtsan"})
        if (name.starts_with(runtime)) return true;
    return frame.find("on_fatal_signal") != std::string_view::npos;
}

}  // namespace

std::string readable_frame(std::string_view raw) {
    const std::size_t open = raw.find('(');
    const std::size_t close = raw.find(')', open == std::string_view::npos ? 0 : open);
    if (open == std::string_view::npos || close == std::string_view::npos) return std::string{raw};
    const std::string_view path = raw.substr(0, open);
    const std::string_view library = path.substr(path.rfind('/') == std::string_view::npos ? 0 : path.rfind('/') + 1);
    const std::string_view inside = raw.substr(open + 1, close - open - 1);
    const std::size_t plus = std::min(inside.rfind('+'), inside.size());
    std::string function = demangled(std::string{inside.substr(0, plus)});
    if (function.size() > limits::crash_frame_bytes_max) function.resize(limits::crash_frame_bytes_max);
    // Without a symbol, the offset is relative to the library and the address adds nothing.
    return fmt::format("{}{} ({})", escaped(function), inside.substr(plus), library);
}

std::string culprit(const std::vector<std::string>& readable_frames) {
    for (const std::string& frame : readable_frames) {
        if (is_runtime(frame)) continue;
        const std::size_t library = frame.rfind(" (");
        const std::size_t offset = frame.rfind("+0x", library);
        if (library == std::string::npos || offset == std::string::npos || offset == 0) return frame;
        return frame.substr(0, offset) + frame.substr(library);
    }
    return {};
}

std::vector<std::string> oom_evidence(const OomCounters& counters, bool unexplained_kill) {
    std::vector<std::string> evidence;
    if (counters.own_cgroup.value_or(0) > 0)
        evidence.push_back(fmt::format("the kernel's OOM killer ended {} process{} in this worker's cgroup",
                                       *counters.own_cgroup, *counters.own_cgroup == 1 ? "" : "es"));
    const auto before = counters.machine_before;
    const auto after = counters.machine_after;
    if (evidence.empty() && unexplained_kill && before && after && *after > *before)
        evidence.push_back(
            fmt::format("the kernel's OOM killer ran during its life ({} on this machine); whom it ended "
                        "is in the kernel's log",
                        *after - *before == 1 ? "once" : fmt::format("{} times", *after - *before)));
    return evidence;
}

std::optional<std::uint64_t> machine_oom_kills() { return oom_kills_in("/proc/vmstat"); }

std::string CrashReport::to_text() const {
    json::object object{{"model", worker.model},
                        {"replica", worker.replica},
                        {"generation", worker.generation},
                        {"pid", pid},
                        {"time", time_ms},
                        {"cause", cause},
                        {"state", state},
                        {"exit", supervisor::to_json(exit)},
                        {"signal", signal ? json::value(signal_name(*signal)) : json::value(nullptr)},
                        {"thread", or_null(thread)},
                        {"backtrace", json::array(backtrace.begin(), backtrace.end())},
                        {"request", or_null(request)},
                        {"request_ms", request.empty() ? json::value(nullptr) : json::value(request_ms)},
                        {"request_unknown", or_null(request_unknown)},
                        {"host_bytes", or_null(host_bytes)},
                        {"gpu_bytes", or_null(gpu_bytes)},
                        {"device", device},
                        {"evidence", json::array(evidence.begin(), evidence.end())},
                        {"ready_ms", ready_for_ms}};
    constexpr std::size_t log_member_bytes = 16;
    std::size_t bytes = json::serialize(object).size() + log_member_bytes;
    std::size_t first = log.size();
    while (first > 0 && bytes <= limits::crash_report_bytes_max) {
        bytes += json::serialize(json::string{log[first - 1]}).size() + 1;
        if (bytes <= limits::crash_report_bytes_max) --first;
    }
    object["log"] = json::array(log.begin() + static_cast<std::ptrdiff_t>(first), log.end());
    return json::serialize(object);
}

std::string CrashReports::name_of(const CrashReport& report) {
    return fmt::format("{:0{}}-{}-{}-{}.json", std::max<std::int64_t>(report.time_ms, 0), time_digits,
                       file_name(report.worker.model), report.worker.replica, report.worker.generation);
}

Result<std::filesystem::path> CrashReports::write(const CrashReport& report) {
    if (folder_.empty())
        return Error{ErrorCode::resources_exhausted, "writing a crash report: the daemon has no folder for logs", {}};
    const std::unique_lock mine{writing_, std::try_to_lock};
    if (!mine)  // the disk blocks another report's write, and would block this one
        return Error{
            ErrorCode::resources_exhausted, "writing a crash report: the disk does not take the one before", {}};
    const auto path = folder_ / name_of(report);
    const auto unfinished = folder_ / ".unfinished";  // one name: overwrites what a killed
                                                      // supervisor left
    int failed = make_own_folder(folder_);
    if (failed == 0) failed = replace_file(path, unfinished, report.to_text());
    if (failed != 0) return system_error("writing " + path.string(), failed);
    const auto all = names();
    for (std::size_t i = 0; i + limits::crash_reports_max < all.size(); ++i) ::unlink((folder_ / all[i]).c_str());
    return path;
}

void CrashReports::note_lost(const WorkerName& worker, const std::string& reason) {
    spdlog::warn("worker={} its crash report is lost: {}", worker.text(), reason);
    const std::scoped_lock lock{counting_};
    lost_ = {lost_.count + 1, unix_ms(), reason};
}

CrashReports::Lost CrashReports::lost() const {
    const std::scoped_lock lock{counting_};
    return lost_;
}

/// Returns the names, oldest first.
std::vector<std::string> CrashReports::names() const {
    std::vector<std::string> names;
    std::error_code ec;
    for (std::filesystem::directory_iterator entry{folder_, ec}, end; !ec && entry != end; entry.increment(ec))
        if (const std::string name = entry->path().filename().string(); is_report_name(name)) names.push_back(name);
    std::ranges::sort(names);
    return names;
}

std::string CrashReports::path_of(const std::string& name) const {
    const bool is_one = is_report_name(name) && name.find('/') == std::string::npos;
    return folder_.empty() || !is_one ? std::string{} : (folder_ / name).string();
}

json::array CrashReports::list(const std::string& model, std::size_t max) const {
    constexpr std::size_t bytes_max = limits::control_answer_bytes_max * 3 / 4;
    json::array reports;
    std::size_t bytes = 0;
    const auto all = names();
    for (auto name = all.rbegin(); name != all.rend() && reports.size() < max; ++name) {
        const auto path = folder_ / *name;
        const auto text = read_file(path.string(), limits::crash_report_bytes_max, O_NOFOLLOW | O_NONBLOCK);
        if (!text) continue;
        boost::system::error_code ec;
        json::value document = json::parse(*text, ec);
        if (ec || !document.is_object()) continue;
        json::object& report = document.get_object();
        const auto of = member<std::string>(report, "model");
        if (!of || !member<std::string>(report, "cause") || (!model.empty() && *of != model)) continue;
        if ((bytes += text->size()) > bytes_max) break;
        report["report"] = path.string();
        reports.push_back(std::move(document));
    }
    return reports;
}

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

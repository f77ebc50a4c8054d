#include "supervisor/keeper_link/next_supervisor.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/auxv.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstdlib>
#include <filesystem>

#include <fmt/format.h>

#include "ipc/base/pidfd.h"
#include "ipc/base/program.h"
#include "supervisor/base/limits.h"

namespace bulkhead::supervisor {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::string_view name = "bulkhead-supervisor ";
constexpr std::string_view before_versions = " keeper-link ";

struct Said {
    int status = 0;  ///< as waitid reports it
    bool by_signal = false;
    bool in_time = true;
    std::string text;  ///< what it printed, output and errors
};

/// Returns false at the end of file. Drops what exceeds the bound.
bool read_some(int fd, std::string& text) {
    std::array<char, 4096> bytes;
    const ssize_t size = ::read(fd, bytes.data(), bytes.size());
    if (size < 0) return errno == EINTR || errno == EAGAIN;
    text.append(bytes.data(),
                std::min(static_cast<std::size_t>(size), limits::next_supervisor_words_max - text.size()));
    return size > 0;
}

/// Reads until the other end is closed, or the deadline.
bool read_all(const UniqueFd& output, Clock::time_point until, std::string& text) {
    pollfd source{output.get(), POLLIN, 0};
    while (true) {
        const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - Clock::now()).count();
        if (left <= 0) return false;
        if (::poll(&source, 1, static_cast<int>(left)) > 0 && !read_some(source.fd, text)) return true;
    }
}

Result<Said> ask(const std::string& program, const std::string& fleet) {
    std::array<int, 2> ends{};
    if (::pipe2(ends.data(), O_CLOEXEC) != 0)
        return system_error(fmt::format("starting {}: a pipe for its words", program), errno);
    const UniqueFd ours{ends[0]};
    UniqueFd theirs{ends[1]};
    const auto pid = start({program, {"bulkhead-supervisor", check_option, fleet}, theirs.get(), theirs.get(), false});
    if (!pid)
        return Error{pid.error().code == ErrorCode::internal ? ErrorCode::load_failed : pid.error().code,
                     pid.error().attempt, pid.error().remedy};

    const auto until = Clock::now() + limits::next_supervisor_deadline;
    theirs.reset();
    Said said;
    const UniqueFd pidfd = pidfd_of(*pid);  // a process that has closed its output may
                                            // still be ending
    said.in_time = read_all(ours, until, said.text) &&
                   ends_within(pidfd, std::chrono::ceil<std::chrono::milliseconds>(until - Clock::now()));
    if (!said.in_time) signal_child(*pid, SIGKILL);
    siginfo_t ended{};
    ::waitid(P_PID, static_cast<id_t>(*pid), &ended, WEXITED);
    said.by_signal = ended.si_code != CLD_EXITED;
    said.status = ended.si_status;
    return said;
}

/// Parses "MIN-MAX" after `before_versions`. Does the range overlap with the keeper's?
bool speaks_one_of(std::string_view line, std::uint16_t min, std::uint16_t max) {
    const auto at = line.find(before_versions);
    if (at == std::string_view::npos) return false;
    const char* end = line.data() + line.size();
    int low = 0;
    int high = 0;
    const auto first = std::from_chars(line.data() + at + before_versions.size(), end, low);
    if (first.ec != std::errc{} || first.ptr == end || *first.ptr != '-') return false;
    return std::from_chars(first.ptr + 1, end, high).ec == std::errc{} && low <= max && high >= min;
}

}  // namespace

std::string introduction() {
    return fmt::format("{}{}{}{}-{}", name, BULKHEAD_VERSION, before_versions, keeper_link::version_min,
                       keeper_link::version_max);
}

std::string next_program(bool with_keeper) {
    if (const char* keeper = std::getenv("BULKHEAD_KEEPER"); with_keeper && keeper != nullptr) {
        std::error_code ec;
        const auto real = std::filesystem::canonical(keeper, ec);
        if (!ec) return real.parent_path() / "bulkhead-supervisor";
    }
    return reinterpret_cast<const char*>(::getauxval(AT_EXECFN));
}

Result<> check_next(const std::string& program, const std::string& fleet, std::uint16_t min, std::uint16_t max) {
    constexpr const char* remedy =
        "the supervisor of now goes on; install bulkheadd and bulkhead-supervisor of one release, and try again";
    const auto refused = [&](const std::string& why) {
        return Error{ErrorCode::load_failed, fmt::format("asking {} to take over: {}", program, why), remedy};
    };
    auto said = ask(program, fleet);
    if (!said) return Error{said.error().code, said.error().attempt, remedy};
    if (!said->in_time)
        return refused(
            fmt::format("no answer within {} s",
                        std::chrono::duration_cast<std::chrono::seconds>(limits::next_supervisor_deadline).count()));
    if (said->by_signal || said->status != 0) {
        if (auto told = error_in(said->text)) return std::move(*told).during(fmt::format("asking {}", program));
        return refused(fmt::format("it ended with {} {}", said->by_signal ? "signal" : "status", said->status));
    }
    const std::string_view all{said->text};
    const auto begin = all.find(name);
    if (begin == std::string_view::npos) return refused("it does not say that it is a supervisor");
    const std::string_view line = all.substr(begin, all.find('\n', begin) - begin);
    if (!speaks_one_of(line, min, max))
        return refused(fmt::format("it says \"{}\", and the keeper speaks versions {} to {}", line, min, max));
    return {};
}

}  // namespace bulkhead::supervisor

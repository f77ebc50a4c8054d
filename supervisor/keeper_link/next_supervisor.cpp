#include "supervisor/keeper_link/next_supervisor.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/auxv.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <span>

#include <fmt/format.h>

#include "ipc/base/pidfd.h"
#include "ipc/base/program.h"
#include "ipc/base/whole_io.h"
#include "supervisor/base/limits.h"

namespace bulkhead::supervisor {
namespace {

constexpr std::string_view name = "bulkhead-supervisor ";
constexpr std::string_view before_versions = " keeper-link ";

constexpr const char* remedy =
    "the supervisor of now goes on; install bulkheadd and bulkhead-supervisor of one release, and try again";

Error refused(const std::string& program, const std::string& why) {
    return {ErrorCode::load_failed, fmt::format("asking {} to take over: {}", program, why), remedy};
}

/// Returns what the program prints, output and errors.
Result<std::string> ask(const std::string& program, const std::string& fleet) {
    // Sealed against growing: what exceeds the bound cannot be written.
    const UniqueFd output{::memfd_create("bulkhead-next-supervisor", MFD_CLOEXEC | MFD_ALLOW_SEALING)};
    if (!output || ::ftruncate(output.get(), limits::next_supervisor_words_max) != 0 ||
        ::fcntl(output.get(), F_ADD_SEALS, F_SEAL_GROW | F_SEAL_SHRINK) != 0) {
        const Error why = system_error(fmt::format("starting {}: a file for its words", program), errno);
        return Error{why.code, why.attempt, remedy};
    }
    const auto pid = start({program, {"bulkhead-supervisor", check_option, fleet}, output.get(), output.get(), false});
    if (!pid)
        return Error{pid.error().code == ErrorCode::internal ? ErrorCode::load_failed : pid.error().code,
                     pid.error().attempt, remedy};

    const bool in_time = ends_within(pidfd_of(*pid), limits::next_supervisor_deadline);
    if (!in_time) signal_child(*pid, SIGKILL);
    siginfo_t ended{};
    ::waitid(P_PID, static_cast<id_t>(*pid), &ended, WEXITED);
    if (!in_time)
        return refused(program, fmt::format("no answer within {} s",
                                            std::chrono::seconds{limits::next_supervisor_deadline}.count()));
    std::string text(limits::next_supervisor_words_max, '\0');
    (void)read_at(output.get(), std::as_writable_bytes(std::span{text}), 0);
    text.resize(std::min(text.find('\0'), text.size()));
    if (ended.si_code == CLD_EXITED && ended.si_status == 0) return text;
    if (auto told = error_in(text)) return std::move(*told).during(fmt::format("asking {}", program));
    return refused(program, fmt::format("it ended with {} {}", ended.si_code == CLD_EXITED ? "status" : "signal",
                                        ended.si_status));
}

/// Parses "MIN-MAX" after `before_versions`. Does the range overlap with the keeper's?
bool speaks_one_of(std::string_view line, std::uint16_t min, std::uint16_t max) {
    const auto at = line.find(before_versions);
    if (at == std::string_view::npos) return false;
    const std::string versions{line.substr(at + before_versions.size())};
    int low = 0;
    int high = 0;
    return std::sscanf(versions.c_str(), "%5d-%5d", &low, &high) == 2 && low <= max && high >= min;
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
    const auto said = ask(program, fleet);
    if (!said) return said.error();
    const std::string_view all{*said};
    const auto begin = all.find(name);
    if (begin == std::string_view::npos) return refused(program, "it does not say that it is a supervisor");
    const std::string_view line = all.substr(begin, all.find('\n', begin) - begin);
    if (!speaks_one_of(line, min, max))
        return refused(program, fmt::format("it says \"{}\", and the keeper speaks versions {} to {}", line, min, max));
    return {};
}

}  // namespace bulkhead::supervisor

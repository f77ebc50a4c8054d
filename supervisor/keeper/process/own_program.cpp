#include "supervisor/keeper/process/own_program.h"

#include <sys/auxv.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <string_view>

#include "ipc/base/pidfd.h"
#include "supervisor/keeper/base/limits.h"
#include "supervisor/keeper/base/say.h"

namespace bulkhead::keeper {
namespace {

/// Descriptor of the state in the checking process.
constexpr int check_state_fd = 3;

bool is_this_program(const std::string& path) {
    struct stat here {};
    struct stat self {};
    return ::stat(path.c_str(), &here) == 0 && ::stat("/proc/self/exe", &self) == 0 && here.st_dev == self.st_dev &&
           here.st_ino == self.st_ino;
}

/// The path given to execve, made absolute; empty if it no longer leads to this program.
std::string path_started_by() {
    const auto* given = reinterpret_cast<const char*>(::getauxval(AT_EXECFN));
    if (given == nullptr) return {};
    std::string path{given};
    if (!path.starts_with('/')) {
        std::array<char, PATH_MAX> here{};
        if (::getcwd(here.data(), here.size()) == nullptr) return {};
        path = std::string{here.data()} + "/" + path;
    }
    return is_this_program(path) ? path : "";
}

}  // namespace

bool starts_from_state(int argc, char** argv) noexcept {
    return argc > 2 && (std::strcmp(argv[1], resume_option) == 0 || std::strcmp(argv[1], check_state_option) == 0);
}

Result<std::string> program_file(const std::string& attempt) {
    std::array<char, PATH_MAX> link{};
    const ssize_t size = ::readlink("/proc/self/exe", link.data(), link.size());
    if (size < 0) return system_error(attempt + " (reading /proc/self/exe)", errno);
    return std::string{link.data(), static_cast<std::size_t>(size)};
}

Result<OwnProgram> OwnProgram::find(int argc, char** argv) {
    std::string path = path_started_by();
    if (path.empty()) {
        auto file = program_file("finding this program");
        if (!file) return file.error();
        path = std::move(*file);
        constexpr std::string_view replaced = " (deleted)";
        if (path.ends_with(replaced) && !is_this_program(path)) path.resize(path.size() - replaced.size());
    }
    OwnProgram program{std::move(path)};
    program.argv_ = {argv[0], nullptr, nullptr};
    for (int i = starts_from_state(argc, argv) ? 3 : 1; i < argc; ++i) program.argv_.push_back(argv[i]);
    program.argv_.push_back(nullptr);
    return program;
}

bool OwnProgram::understands(int state_fd, Spawner& spawner, int null_fd, int oom_score_adj) noexcept {
    // Passes the whole command line: an option that the next release does not know fails now, too.
    std::snprintf(state_number_.data(), state_number_.size(), "%d", check_state_fd);
    argv_[1] = const_cast<char*>(check_state_option);
    argv_[2] = state_number_.data();
    const std::array<int, 4> descriptors{null_fd, STDOUT_FILENO, STDERR_FILENO, state_fd};
    const auto child = spawner.spawn({.program = path(),
                                      .argv = argv_.data(),
                                      .environment = environ,
                                      .descriptors = descriptors,
                                      .oom_score_adj = oom_score_adj});
    if (!child) {
        say("WARN upgrade: starting %s: %s", path(), strerrordesc_np(child.error().error_number));
        return false;
    }

    const bool ready = ends_within(child->pidfd, limits::state_check_deadline);
    signal_group(child->pid, SIGKILL);
    siginfo_t ended{};
    ::waitid(P_PIDFD, static_cast<id_t>(child->pidfd.get()), &ended, WEXITED);
    if (ready && ended.si_code == CLD_EXITED && ended.si_status == 0) return true;
    say("WARN upgrade: %s does not take this keeper's state (%s %d)", path(),
        !ready                        ? "no answer,"
        : ended.si_code == CLD_EXITED ? "exit status"
                                      : "signal",
        ended.si_status);
    return false;
}

void OwnProgram::execute(int state_fd) noexcept {
    std::snprintf(state_number_.data(), state_number_.size(), "%d", state_fd);
    argv_[1] = const_cast<char*>(resume_option);
    argv_[2] = state_number_.data();
    ::execve(path(), argv_.data(), environ);
}

}  // namespace bulkhead::keeper

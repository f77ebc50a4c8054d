#include <fcntl.h>
#include <poll.h>
#include <spawn.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <optional>

#include <fmt/format.h>

#include "bulkhead/control.h"
#include "clients/cli/commands/command.h"
#include "clients/cli/commands/start_daemon.h"
#include "clients/cli/text/json_access.h"
#include "clients/cli/text/limits.h"
#include "ipc/base/unique_fd.h"

namespace bulkhead::cli {
namespace {

using Clock = std::chrono::steady_clock;

/// A folder of ours that nobody else can write to; made with mode 0700 where it is missing.
Result<UniqueFd> open_own_folder(int parent, const std::string& name, const std::string& shown) {
    if (::mkdirat(parent, name.c_str(), 0700) != 0 && errno != EEXIST) {
        if (errno != ENOENT && errno != ENOTDIR) return system_error("creating the runtime directory " + shown, errno);
        return Error{ErrorCode::input_invalid,
                     fmt::format("creating the runtime directory {}: there is no folder {} to make it in", shown,
                                 std::filesystem::path{shown}.parent_path().string()),
                     "make that folder first, or choose another place with --socket"};
    }
    UniqueFd folder{::openat(parent, name.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC)};
    if (!folder && (errno == ENOTDIR || errno == ELOOP))
        return Error{ErrorCode::not_permitted, fmt::format("using {}: it is a symlink or no directory", shown),
                     "remove it, or choose another place with --socket"};
    if (!folder) return system_error("opening the runtime directory " + shown, errno);
    struct stat facts {};
    if (::fstat(folder.get(), &facts) != 0) return system_error("looking at " + shown, errno);
    if (facts.st_uid != ::geteuid())
        return Error{ErrorCode::not_permitted, fmt::format("using {}: it belongs to another user", shown),
                     "choose another place with --socket"};
    if ((facts.st_mode & (S_IWGRP | S_IWOTH)) != 0)
        return Error{ErrorCode::not_permitted,
                     fmt::format("using {}: users other than its owner may write to it", shown),
                     fmt::format("`chmod 700 {}`, or choose another place with --socket", shown)};
    return folder;
}

Result<UniqueFd> open_output(const std::filesystem::path& socket) {
    const std::filesystem::path folder = socket.parent_path();
    const auto runtime = open_own_folder(AT_FDCWD, folder.string(), folder.string());
    if (!runtime) return runtime.error();
    const auto logs = open_own_folder(runtime->get(), "logs", (folder / "logs").string());
    if (!logs) return logs.error();
    UniqueFd file{::openat(logs->get(), "bulkheadd.out", O_RDWR | O_CREAT | O_APPEND | O_NOFOLLOW | O_CLOEXEC, 0600)};
    if (!file) return system_error("opening " + (folder / "logs" / "bulkheadd.out").string(), errno);
    return file;
}

Result<pid_t> spawn(const StartOptions& options, int output) {
    posix_spawn_file_actions_t actions;
    ::posix_spawn_file_actions_init(&actions);
    ::posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
    ::posix_spawn_file_actions_adddup2(&actions, output, STDOUT_FILENO);
    ::posix_spawn_file_actions_adddup2(&actions, output, STDERR_FILENO);
    ::posix_spawn_file_actions_addclosefrom_np(&actions, STDERR_FILENO + 1);  // a caller's pipes stay the caller's
    ::posix_spawn_file_actions_addchdir_np(&actions, "/");                    // keeps no file system busy
    posix_spawnattr_t attributes;
    ::posix_spawnattr_init(&attributes);
    sigset_t none;
    ::sigemptyset(&none);
    sigset_t all;
    ::sigfillset(&all);
    ::posix_spawnattr_setsigmask(&attributes, &none);
    ::posix_spawnattr_setsigdefault(&attributes, &all);
    ::posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSID | POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);

    std::string words[] = {options.program.string(), "--socket", options.socket.string(), options.fleet.string()};
    char* arguments[] = {words[0].data(), words[1].data(), words[2].data(), words[3].data(), nullptr};
    pid_t pid = 0;
    const int failed = ::posix_spawn(&pid, words[0].c_str(), &actions, &attributes, arguments, environ);
    ::posix_spawnattr_destroy(&attributes);
    ::posix_spawn_file_actions_destroy(&actions);
    if (failed != 0) {
        Error error = system_error("starting " + words[0], failed);
        if (error.remedy.empty()) error.remedy = "install bulkheadd beside this program";
        return error;
    }
    return pid;
}

/// True when the process ended within `patience`.
bool has_ended(int pidfd, std::chrono::milliseconds patience) {
    pollfd ended{pidfd, POLLIN, 0};
    return ::poll(&ended, 1, static_cast<int>(std::max<std::int64_t>(patience.count(), 0))) > 0;
}

Error why_it_ended(pid_t pid, int output, off_t start) {
    int wait_status = 0;
    while (::waitpid(pid, &wait_status, 0) < 0 && errno == EINTR) {
    }
    const off_t end = ::lseek(output, 0, SEEK_END);
    std::string printed(limits::start_message_bytes, '\0');
    const off_t from = std::max(start, end - static_cast<off_t>(printed.size()));
    const ssize_t size = ::pread(output, printed.data(), printed.size(), from);
    printed.resize(static_cast<std::size_t>(std::max<ssize_t>(size, 0)));
    return error_in(printed, wait_status);
}

}  // namespace

std::filesystem::path daemon_beside_us() {
    std::error_code failure;
    return std::filesystem::read_symlink("/proc/self/exe", failure).parent_path() / "bulkheadd";
}

Error error_in(std::string_view printed, int wait_status) {
    const std::string how = WIFSIGNALED(wait_status) ? fmt::format("signal {}", WTERMSIG(wait_status))
                                                     : fmt::format("exit status {}", WEXITSTATUS(wait_status));
    const bool is_config = WIFEXITED(wait_status) && WEXITSTATUS(wait_status) == exit_config_invalid;
    Error error{is_config ? ErrorCode::config_invalid : ErrorCode::internal, {}, {}};
    const std::size_t said = printed.rfind("error: ");
    if (said != std::string_view::npos) {
        std::string_view line = printed.substr(said + 7);
        line = line.substr(0, line.find('\n'));
        const std::size_t colon = line.find(": ");
        if (const auto code = error_code_from(line.substr(0, colon)); code && colon != std::string_view::npos) {
            if (!is_config) error.code = *code;
            line.remove_prefix(colon + 2);
        }
        const std::size_t semicolon = line.rfind("; ");
        error.attempt = line.substr(0, semicolon);
        if (semicolon != std::string_view::npos) error.remedy = line.substr(semicolon + 2);
        return error;
    }
    error.attempt = fmt::format("starting the daemon: it ended with {}{}{}", how, printed.empty() ? "" : ": ", printed);
    error.remedy = "see logs/ beside the control socket";
    return error;
}

Result<json::value> start_daemon(const StartOptions& options) {
    const Clock::time_point until = Clock::now() + limits::start;
    const auto left = [&] { return std::chrono::ceil<std::chrono::milliseconds>(until - Clock::now()); };
    const auto output = open_output(options.socket);
    if (!output) return output.error();
    const off_t output_start = ::lseek(output->get(), 0, SEEK_END);
    const auto pid = spawn(options, output->get());
    if (!pid) return pid.error();
    const UniqueFd pidfd{
        static_cast<int>(::syscall(SYS_pidfd_open, *pid, 0))};  // our unreaped child: cannot be another's
    if (!pidfd) return system_error("opening a pidfd of the daemon", errno);

    while (left() > limits::start_probe) {
        if (has_ended(pidfd.get(), limits::start_probe)) return why_it_ended(*pid, output->get(), output_start);
        Result<ControlClient> control = ControlClient::connect(options.socket);
        if (!control) continue;  // it does not listen yet
        Result<Answer> info = control->call("daemon.info", {}, left());
        if (!info) continue;  // it has gone, or will be found gone; or time is up
        if (integer_member(info->result, "keeper_pid") == *pid) return std::move(info->result);
        // Another daemon answers: two were started at once, and ours lost.
        if (has_ended(pidfd.get(), limits::start_loser)) return why_it_ended(*pid, output->get(), output_start);
        return Error{ErrorCode::already_running,
                     fmt::format("starting a daemon on {}: another one answers", options.socket.string()),
                     fmt::format("use that one; ours, pid {}, did not end by itself", *pid)};
    }
    return Error{ErrorCode::deadline_exceeded,
                 fmt::format("starting the daemon: no answer within {} s, pid {} still runs",
                             limits::start.count() / 1000, *pid),
                 fmt::format("see {}", (options.socket.parent_path() / "logs").string())};
}

}  // namespace bulkhead::cli

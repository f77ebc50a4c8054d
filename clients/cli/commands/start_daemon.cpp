#include <fcntl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>

#include <fmt/format.h>

#include "bulkhead/control.h"
#include "clients/cli/commands/command.h"
#include "clients/cli/commands/start_daemon.h"
#include "clients/cli/text/json_access.h"
#include "clients/cli/text/limits.h"
#include "ipc/base/pidfd.h"
#include "ipc/base/program.h"

namespace bulkhead::cli {
namespace {

using Clock = std::chrono::steady_clock;

/// Opens a folder of ours that only we can write to; creates it with mode 0700 if it is missing.
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

Error why_it_ended(pid_t pid, int output, off_t start) {
    int wait_status = 0;
    ::waitpid(pid, &wait_status, 0);
    const off_t end = ::lseek(output, 0, SEEK_END);
    std::string printed(limits::start_message_bytes, '\0');
    const off_t from = std::max(start, end - static_cast<off_t>(printed.size()));
    const ssize_t size = ::pread(output, printed.data(), printed.size(), from);
    printed.resize(static_cast<std::size_t>(std::max<ssize_t>(size, 0)));

    const bool is_config = WIFEXITED(wait_status) && WEXITSTATUS(wait_status) == exit_config_invalid;
    if (auto said = error_in(printed)) {
        if (is_config) said->code = ErrorCode::config_invalid;
        return std::move(*said);
    }
    const std::string how = WIFSIGNALED(wait_status) ? fmt::format("signal {}", WTERMSIG(wait_status))
                                                     : fmt::format("exit status {}", WEXITSTATUS(wait_status));
    return {is_config ? ErrorCode::config_invalid : ErrorCode::internal,
            fmt::format("starting the daemon: it ended with {}{}{}", how, printed.empty() ? "" : ": ", printed),
            "see logs/ beside the control socket"};
}

}  // namespace

std::filesystem::path program_folder() {
    std::error_code failure;
    return std::filesystem::read_symlink("/proc/self/exe", failure).parent_path();
}

Result<json::value> start_daemon(const std::filesystem::path& program, const std::filesystem::path& fleet,
                                 const std::filesystem::path& socket) {
    const Clock::time_point until = Clock::now() + limits::start;
    const auto left = [&] { return std::chrono::ceil<std::chrono::milliseconds>(until - Clock::now()); };
    const auto output = open_output(socket);
    if (!output) return output.error();
    const off_t output_start = ::lseek(output->get(), 0, SEEK_END);
    const auto pid = start({program.string(),
                            {program.string(), "--socket", socket.string(), fleet.string()},
                            output->get(),
                            output->get(),
                            true});
    if (!pid)
        return Error{pid.error().code, pid.error().attempt,
                     pid.error().remedy.empty() ? "install bulkheadd beside this program" : pid.error().remedy};
    const UniqueFd pidfd = pidfd_of(*pid);  // our unreaped child, so the pid cannot be
                                            // another process'
    if (!pidfd) return system_error("opening a pidfd of the daemon", errno);

    while (left() > limits::start_probe) {
        if (ends_within(pidfd, limits::start_probe)) return why_it_ended(*pid, output->get(), output_start);
        Result<ControlClient> control = ControlClient::connect(socket);
        if (!control) continue;  // it does not listen yet
        Result<Answer> info = control->call("daemon.info", {}, left());
        if (!info) continue;  // it has gone, or is about to; or time is up
        if (integer_member(info->result, "keeper_pid") == *pid) return std::move(info->result);
        // Another daemon answers: two were started at once, and ours lost the race.
        if (ends_within(pidfd, limits::start_loser)) return why_it_ended(*pid, output->get(), output_start);
        return Error{ErrorCode::already_running,
                     fmt::format("starting a daemon on {}: another one answers", socket.string()),
                     fmt::format("use that one; ours, pid {}, did not end by itself", *pid)};
    }
    return Error{ErrorCode::deadline_exceeded,
                 fmt::format("starting the daemon: no answer within {} s, pid {} still runs",
                             limits::start.count() / 1000, *pid),
                 fmt::format("see {}", (socket.parent_path() / "logs").string())};
}

}  // namespace bulkhead::cli

#include "supervisor/keeper/process/supervisor_process.h"

#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <string_view>

#include "ipc/base/pidfd.h"
#include "supervisor/keeper/base/limits.h"
#include "supervisor/keeper/service/service_manager.h"

namespace bulkhead::keeper {

SupervisorCommand::SupervisorCommand(std::string program, const std::string& socket_path, std::string fleet,
                                     const std::string& beside)
    : program_{std::move(program)}, words_{"bulkhead-supervisor", "--socket", socket_path, std::move(fleet)},
      socket_variable_{"BULKHEAD_SOCKET=" + socket_path}, beside_variable_{"BULKHEAD_KEEPER=" + beside} {
    for (std::string& word : words_) argv_.push_back(word.data());
    argv_.push_back(nullptr);
    for (char** variable = environ; *variable != nullptr; ++variable) {
        const std::string_view text{*variable};
        if (!text.starts_with("BULKHEAD_SOCKET=") && !text.starts_with("BULKHEAD_KEEPER=") &&
            !is_for_the_keeper_alone(text))
            environment_.push_back(*variable);
    }
    environment_.push_back(socket_variable_.data());
    if (!beside.empty()) environment_.push_back(beside_variable_.data());
    environment_.push_back(nullptr);
}

SpawnResult<void> SupervisorProcess::start(Spawner& spawner, const SupervisorCommand& command, int null_fd,
                                           int listening_fd, int oom_score_adj) noexcept {
    ++starts_;
    std::array<int, 2> ends{};
    if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends.data()) != 0)
        return SpawnFailure{SpawnStep::socket_pair, errno};
    PacketSocket ours{UniqueFd{ends[0]}};
    const UniqueFd theirs{ends[1]};

    const std::array<int, 5> descriptors{null_fd, STDOUT_FILENO, STDERR_FILENO, theirs.get(), listening_fd};
    auto child = spawner.spawn({.program = command.program(),
                                .argv = command.argv(),
                                .environment = command.environment(),
                                .descriptors = descriptors,
                                .oom_score_adj = oom_score_adj});
    if (!child) return child.error();

    child_ = std::move(*child);
    link_ = std::move(ours);
    has_greeted_ = false;
    unread_bytes_ = 0;
    started_ = Clock::now();
    start_due_ = never;
    deadline_ = started_ + limits::supervisor_hello_deadline;
    return {};
}

std::chrono::milliseconds SupervisorProcess::ended(bool handed_over) noexcept {
    const auto now = Clock::now();
    if (runs() && now - started_ >= limits::supervisor_settled) next_delay_ = 0;
    child_ = Child{};
    link_.close();
    has_greeted_ = false;
    deadline_ = never;
    read_by_ = never;
    start_due_ = now;
    if (handed_over) return {};
    const auto delay = limits::restart_delays[next_delay_];
    next_delay_ = std::min(next_delay_ + 1, limits::restart_delays.size() - 1);
    start_due_ = now + delay;
    return delay;
}

void SupervisorProcess::greeted() noexcept {
    has_greeted_ = true;
    ever_greeted_ = true;
    deadline_ = never;
}

void SupervisorProcess::link_closed() noexcept {
    link_.close();
    read_by_ = never;
    deadline_ = Clock::now() + limits::supervisor_end_deadline;
}

void SupervisorProcess::kill() noexcept {
    if (runs()) send_signal(child_.pidfd, SIGKILL);
    link_.close();
    deadline_ = never;
    read_by_ = never;
}

void SupervisorProcess::note_reading() noexcept {
    const int unread = link_.unread_bytes();
    if (unread == 0 || unread < unread_bytes_) read_by_ = never;
    unread_bytes_ = unread;
}

void SupervisorProcess::note_sent() noexcept {
    unread_bytes_ = link_.unread_bytes();
    const bool is_watched = has_greeted_ && deadline_ == never && unread_bytes_ != 0;
    if (!is_watched)
        read_by_ = never;
    else if (read_by_ == never)
        read_by_ = Clock::now() + limits::supervisor_read_deadline;
}

}  // namespace bulkhead::keeper

#pragma once

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

namespace bulkhead::supervisor::test {

/// A process that only waits, with an environment of its own, in a process group of its own.
class MarkedProcess {
public:
    /// `program`  reads its standard input to the end
    explicit MarkedProcess(std::vector<std::string> environment, std::string program = "/bin/cat") {
        std::vector<char*> variables;
        for (auto& variable : environment) variables.push_back(variable.data());
        variables.push_back(nullptr);
        // It waits for its input, which ends with this process: nothing is left of a
        // test that dies.
        int ends[2];
        if (::pipe2(ends, O_CLOEXEC) != 0) std::abort();
        posix_spawn_file_actions_t actions;
        posix_spawnattr_t attributes;
        posix_spawn_file_actions_init(&actions);
        posix_spawn_file_actions_adddup2(&actions, ends[0], STDIN_FILENO);
        posix_spawnattr_init(&attributes);
        posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP);
        posix_spawnattr_setpgroup(&attributes, 0);
        char* argv[] = {program.data(), nullptr};
        if (::posix_spawn(&pid_, program.c_str(), &actions, &attributes, argv, variables.data()) != 0) std::abort();
        posix_spawn_file_actions_destroy(&actions);
        posix_spawnattr_destroy(&attributes);
        ::close(ends[0]);
        input_ = ends[1];
    }
    ~MarkedProcess() {
        kill();
        wait();
        ::close(input_);
    }
    MarkedProcess(const MarkedProcess&) = delete;
    MarkedProcess& operator=(const MarkedProcess&) = delete;

    [[nodiscard]] pid_t pid() const noexcept { return pid_; }
    void kill() const {
        if (!reaped_) ::kill(pid_, SIGKILL);
    }
    [[nodiscard]] bool is_running() const { return !reaped_ && ::waitpid(pid_, nullptr, WNOHANG) == 0; }
    /// The signal that ended it.
    int wait() {
        if (reaped_) return 0;
        int status = 0;
        ::waitpid(pid_, &status, 0);
        reaped_ = true;
        return WIFSIGNALED(status) ? WTERMSIG(status) : 0;
    }

private:
    pid_t pid_ = 0;
    int input_ = -1;
    bool reaped_ = false;
};

/// Like one, but its first thread has ended, and another waits.
class LeaderlessProcess : public MarkedProcess {
public:
    explicit LeaderlessProcess(std::vector<std::string> environment)
        : MarkedProcess{std::move(environment), BULKHEAD_BINARY_DIR "/bin/leaderless"} {
        siginfo_t ended{};
        const std::string stat = "/proc/" + std::to_string(pid()) + "/stat";
        for (std::string text; ended.si_pid == 0 && text.find(") Z ") == std::string::npos;) {
            std::getline(std::ifstream{stat}, text);
            ::waitid(P_PID, static_cast<id_t>(pid()), &ended, WEXITED | WNOHANG | WNOWAIT);
        }
        if (ended.si_pid != 0) std::abort();  // all of it has
    }
};

}  // namespace bulkhead::supervisor::test

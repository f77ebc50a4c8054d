#pragma once

#include <string>
#include <vector>

#include "supervisor/keeper/base/packet_socket.h"
#include "supervisor/keeper/process/spawn.h"
#include "supervisor/keeper/state/worker_table.h"

namespace bulkhead::keeper {

/// How to start a supervisor: `bulkhead-supervisor --socket PATH FLEET`, with the keeper's environment and
/// BULKHEAD_SOCKET; with BULKHEAD_KEEPER, the path of the keeper's own program, where the next one is found beside
/// that, so that a supervisor knows what an upgrade would start. Built once, so that a restart allocates nothing.
class SupervisorCommand {
public:
    /// `beside` is empty when the program was named.
    SupervisorCommand(std::string program, const std::string& socket_path, std::string fleet,
                      const std::string& beside);

    [[nodiscard]] const char* program() const noexcept { return program_.c_str(); }
    [[nodiscard]] char* const* argv() const noexcept { return argv_.data(); }
    [[nodiscard]] char* const* environment() const noexcept { return environment_.data(); }

private:
    std::string program_;
    std::vector<std::string> words_;
    std::string socket_variable_;
    std::string beside_variable_;
    std::vector<char*> argv_;
    std::vector<char*> environment_;
};

/// The supervisor of now, and when the next one starts.
class SupervisorProcess {
public:
    /// Starts one with a fresh link. What fails is retried like a death, by `ended`.
    [[nodiscard]] SpawnResult<void> start(Spawner& spawner, const SupervisorCommand& command, int null_fd,
                                          int listening_fd, int oom_score_adj) noexcept;

    /// It is reaped, or could not be started: the next start is due after a delay that grows while they die young.
    /// After one that handed over, it is due at once, and that row stays as it is.
    /// Returns  the delay
    std::chrono::milliseconds ended(bool handed_over = false) noexcept;

    /// So many were started by a former program of this process.
    void resume(std::uint64_t starts) noexcept {
        starts_ = starts;
        ever_greeted_ = true;
    }

    void greeted() noexcept;
    void link_closed() noexcept;
    void must_end_by(Clock::time_point deadline) noexcept { deadline_ = deadline; }

    /// Watches that it reads its link: before each sending, and again after it. A deadline runs while something is
    /// unread and nothing of it gets read; before the hello, and once it is to end, other deadlines do.
    void note_reading() noexcept;
    void note_sent() noexcept;
    [[nodiscard]] Clock::time_point read_deadline() const noexcept { return read_by_; }
    void kill() noexcept;

    [[nodiscard]] PacketSocket& link() noexcept { return link_; }
    [[nodiscard]] pid_t pid() const noexcept { return child_.pid; }
    [[nodiscard]] bool runs() const noexcept { return child_.pid > 0; }
    [[nodiscard]] bool has_greeted() const noexcept { return has_greeted_; }
    [[nodiscard]] bool ever_greeted() const noexcept { return ever_greeted_; }
    [[nodiscard]] std::uint64_t starts() const noexcept { return starts_; }
    [[nodiscard]] Clock::time_point start_due() const noexcept { return start_due_; }
    /// By when it must have said hello or, once its link is closed, have ended.
    [[nodiscard]] Clock::time_point deadline() const noexcept { return deadline_; }

private:
    Child child_;
    PacketSocket link_;
    bool has_greeted_ = false;
    bool ever_greeted_ = false;
    std::uint64_t starts_ = 0;
    std::size_t next_delay_ = 0;
    Clock::time_point started_{};
    Clock::time_point start_due_{};  ///< at once
    Clock::time_point deadline_ = never;
    Clock::time_point read_by_ = never;
    int unread_bytes_ = 0;  ///< when it was looked at last
};

}  // namespace bulkhead::keeper

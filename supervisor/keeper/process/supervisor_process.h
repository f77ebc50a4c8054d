#pragma once

#include <string>
#include <vector>

#include "supervisor/keeper/base/packet_socket.h"
#include "supervisor/keeper/process/spawn.h"
#include "supervisor/keeper/state/worker_table.h"

namespace bulkhead::keeper {

/// How to start a supervisor: `bulkhead-supervisor --socket PATH FLEET`, with the keeper's
/// environment and BULKHEAD_SOCKET. If the supervisor was found beside the keeper, BULKHEAD_KEEPER
/// is the path of the keeper's program: the supervisor then knows what an upgrade would start.
/// Built once: a restart allocates nothing.
class SupervisorCommand {
public:
    /// `beside`: path of the keeper's program; empty if the supervisor was named explicitly.
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

/// The present supervisor, and when the next one starts.
class SupervisorProcess {
public:
    /// Starts a supervisor with a new link. After a failure call `ended`, as after a death.
    [[nodiscard]] SpawnResult<void> start(Spawner& spawner, const SupervisorCommand& command, int null_fd,
                                          int listening_fd, int oom_score_adj) noexcept;

    /// The supervisor was reaped, or could not be started. Plans the next start after a delay,
    /// which grows while supervisors die young. After a hand-over the start is due at once, and the
    /// next delay stays the same.
    /// Returns  the delay
    std::chrono::milliseconds ended(bool handed_over = false) noexcept;

    /// `starts`: supervisors that a former program of this process started.
    void resume(std::uint64_t starts) noexcept {
        starts_ = starts;
        ever_greeted_ = true;
    }

    void greeted() noexcept;
    void link_closed() noexcept;
    void must_end_by(Clock::time_point deadline) noexcept { deadline_ = deadline; }

    /// Watches that the supervisor reads its link; called before and after each sending. A deadline
    /// runs while unread data does not shrink. Before the hello, and once the supervisor is to end,
    /// other deadlines apply.
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
    int unread_bytes_ = 0;  ///< at the last look
};

}  // namespace bulkhead::keeper

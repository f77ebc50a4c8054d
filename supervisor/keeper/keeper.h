#pragma once

#include <cstdint>

#include "supervisor/keeper/process/own_program.h"
#include "supervisor/keeper/process/reap.h"
#include "supervisor/keeper/process/spawn.h"
#include "supervisor/keeper/process/supervisor_process.h"
#include "supervisor/keeper/service/runtime_directory.h"
#include "supervisor/keeper/service/service_manager.h"
#include "supervisor/keeper/state/outbox.h"
#include "supervisor/keeper/state/saved_state.h"
#include "supervisor/keeper/state/worker_table.h"

namespace bulkhead::keeper {

/// Exit status of a supervisor, and then of the keeper, for an invalid configuration (EX_CONFIG).
inline constexpr int exit_config_invalid = 78;

/// What `main` prepares for the keeper.
struct Station {
    RuntimeDirectory directory;
    SupervisorCommand command;
    OwnProgram program;
    ServiceManager service_manager;
    Spawner spawner;
    UniqueFd null;
    UniqueFd signals;  ///< signalfd of TERM, INT, HUP, CHLD, which are all blocked
    int oom_score_own = 0;
    int oom_score_worker = 0;
};

/// The parent of all other processes: starts what the supervisor requests, reports how it ended,
/// restarts the supervisor and passes everything on to the next one. It decides nothing else.
///
/// Thread  the only one of the process. Blocks only in `run`'s poll, until a child has executed its
///         program, and while the next release checks the state. Allocates nothing once it runs.
class Keeper {
public:
    explicit Keeper(Station station) noexcept;

    /// Call before `run`: continues where the former program of this process stopped.
    void resume(const SavedState& state);

    /// Returns  the program's exit status, after every other process has ended
    int run() noexcept;

private:
    enum class Course : std::uint8_t {
        serving,
        stop_asked,  ///< by a signal: the supervisor unloads all, then sends `stop`
        stopping,    ///< the supervisor has sent `stop` and is ending
        ended,
    };

    /// What the present supervisor announced about its own end.
    enum class Parting : std::uint8_t { none, hand_over, upgrade };

    void wait_for_events() noexcept;
    void take_signals() noexcept;
    void on_stop_signal() noexcept;
    void on_hangup() noexcept;
    void take_children() noexcept;
    void take_requests() noexcept;
    void pass_deadlines() noexcept;
    void send_due() noexcept;
    [[nodiscard]] Clock::time_point next_deadline() noexcept;

    void start_supervisor() noexcept;
    void on_supervisor_ended(const EndedChild& supervisor) noexcept;
    void on_link_closed() noexcept;
    void on_unread_link() noexcept;
    void drain_link() noexcept;
    void on_violation(const char* what) noexcept;
    void re_execute() noexcept;
    [[nodiscard]] keeper_link::UpgradeFailure try_to_re_execute() noexcept;
    void keep_descriptors_across_exec(bool kept) noexcept;
    void end(int status) noexcept;

    void on_worker_ended(Worker& worker, const EndedChild& ended) noexcept;
    void settle_ending(Clock::time_point now) noexcept;

    void on_request(ReceivedPacket packet) noexcept;
    void on_hello(std::span<const std::byte> body) noexcept;
    void on_spawn(ReceivedPacket& packet) noexcept;
    void on_signal(std::span<const std::byte> body) noexcept;
    void on_ledger(std::span<const std::byte> body) noexcept;
    void on_forget(std::span<const std::byte> body) noexcept;
    void on_stop() noexcept;
    void on_parting(Parting parting, std::span<const std::byte> body) noexcept;
    void on_reload_done(std::span<const std::byte> body) noexcept;

    Station station_;
    WorkerTable table_;
    SupervisorProcess supervisor_;
    Outbox outbox_;
    Course course_ = Course::serving;
    Parting parting_ = Parting::none;
    int exit_status_ = 0;
    bool children_left_ = false;     ///< more to reap than one turn allows
    bool link_is_full_ = false;      ///< the next packet waits until the socket is writable
    bool claim_is_answered_ = true;  ///< false: no descriptor was free for it, until a child ends
    bool incompatible_ = false;      ///< the present supervisor speaks no version of ours
    std::uint64_t violations_ = 0;
    std::uint64_t generation_last_ = 0;
    std::uint64_t started_unix_ms_ = 0;
    std::uint16_t executions_ = 0;  ///< re-executions of this process; wraps
    keeper_link::UpgradeFailure upgrade_failed_ = keeper_link::UpgradeFailure::none;
    Clock::time_point stop_by_ = never;
    Clock::time_point send_retry_ = never;
    Clock::time_point reload_by_ = never;  ///< the service manager waits for the
                                           ///< outcome of a reload
};

}  // namespace bulkhead::keeper

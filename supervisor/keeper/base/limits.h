#pragma once

#include <array>
#include <chrono>
#include <cstddef>

/// Every bound of the keeper in one place.
namespace bulkhead::keeper::limits {

using std::chrono::milliseconds;

/// Connections that wait while a supervisor restarts; the kernel caps it at net.core.somaxconn.
inline constexpr int listen_backlog = 4096;
/// Daemons that look who holds the claim, before this one takes notice.
inline constexpr int claim_backlog = 128;
/// Whoever holds the claim without the lock may be about to end, as one that lost the race for the lock is; after this
/// it is a daemon whose directory was removed.
inline constexpr milliseconds claim_patience{500};

/// Between SIGTERM or SIGINT and the supervisor's `stop`; then everything is killed.
inline constexpr milliseconds stop_deadline{60'000};
/// Between the start of a supervisor and its hello; then it is killed and restarted.
inline constexpr milliseconds supervisor_hello_deadline{30'000};
/// Between the end of a supervisor's link, or its `stop`, and its own end; then it is killed.
inline constexpr milliseconds supervisor_end_deadline{5'000};
/// Between a worker's end and that of its process group, which got SIGKILL at once; then
/// `exited` says that the group was not seen empty.
inline constexpr milliseconds group_empty_deadline{2'000};
/// Between SIGKILL to everything and the keeper's own end.
inline constexpr milliseconds kill_everything_deadline{5'000};
/// Before a packet that the kernel had no room for (in-flight descriptors, memory) is tried again.
inline constexpr milliseconds send_retry{20};

/// Between a packet to a greeted supervisor and its reading; then it hangs, and is killed.
inline constexpr milliseconds supervisor_read_deadline{10'000};
/// Between SIGHUP and the word of the supervisor, by handing over or otherwise; then the service manager is told
/// that the daemon is ready as it was.
inline constexpr milliseconds reload_deadline{60'000};
/// A new release looks at the state it would take over; then it is killed, and the old one goes on.
inline constexpr milliseconds state_check_deadline{5'000};

/// Delay before each further start of a supervisor; the last one repeats.
inline constexpr std::array restart_delays{milliseconds{0}, milliseconds{250}, milliseconds{500}, milliseconds{1'000},
                                           milliseconds{2'000}};
/// A supervisor that lived this long has adopted what there was, and starts that row again: who dies of what it is
/// asked to do must not keep the others waiting for the next one.
inline constexpr milliseconds supervisor_settled{1'000};

/// Children reaped before other events get their turn.
inline constexpr int reaps_per_turn = 256;
/// Requests served before other events get their turn.
inline constexpr int requests_per_turn = 64;

/// Packets of a supervisor that hung up; what a socket buffer can hold is less.
inline constexpr int last_words_max = 1024;

/// The keeper is this much less likely to be chosen by the OOM killer than what started it, and each
/// worker this much more; units of oom_score_adj, thousandths of all memory.
inline constexpr int oom_score_keeper = -500;
inline constexpr int oom_score_worker = +1;

/// One line on standard error. At most PIPE_BUF, so that a writable pipe takes it without blocking.
inline constexpr std::size_t log_line_bytes_max = 512;
/// One word to the service manager.
inline constexpr std::size_t status_bytes_max = 256;
/// A path in the state that the keeper hands to its next program.
inline constexpr std::size_t path_bytes_max = 4096;

}  // namespace bulkhead::keeper::limits

#pragma once

#include <array>
#include <chrono>
#include <cstddef>

/// All bounds of the keeper.
namespace bulkhead::keeper::limits {

using std::chrono::milliseconds;

/// Pending connections while a supervisor restarts; the kernel caps it at net.core.somaxconn.
inline constexpr int listen_backlog = 4096;
/// Pending connections of daemons that ask who holds the claim.
inline constexpr int claim_backlog = 128;
/// A claim holder without the lock may be about to end, because it lost the race for the lock. A
/// holder that outlives this is a daemon whose directory was removed.
inline constexpr milliseconds claim_patience{500};

/// From SIGTERM or SIGINT to the supervisor's `stop`; then everything is killed.
inline constexpr milliseconds stop_deadline{60'000};
/// From the start of a supervisor to its hello; then it is killed and restarted.
inline constexpr milliseconds supervisor_hello_deadline{30'000};
/// From the end of a supervisor's link, or its `stop`, to its own end; then it is killed.
inline constexpr milliseconds supervisor_end_deadline{5'000};
/// From a worker's end to the end of its process group, which got SIGKILL at once; then `exited`
/// says that the group was not seen empty.
inline constexpr milliseconds group_empty_deadline{2'000};
/// From SIGKILL to everything to the keeper's own end.
inline constexpr milliseconds kill_everything_deadline{5'000};
/// Until a packet is retried that the kernel had no room for (in-flight descriptors, memory).
inline constexpr milliseconds send_retry{20};

/// From a packet to a greeted supervisor to its reading; then it counts as hung and is killed.
inline constexpr milliseconds supervisor_read_deadline{10'000};
/// From SIGHUP to the supervisor's answer, a hand-over or a report; then the service manager is
/// told that the daemon is ready, unchanged.
inline constexpr milliseconds reload_deadline{60'000};
/// For a new release to check the state it would take over; then it is killed, and the
/// old one goes on.
inline constexpr milliseconds state_check_deadline{5'000};

/// Delay before each further start of a supervisor; the last value repeats.
inline constexpr std::array restart_delays{milliseconds{0}, milliseconds{250}, milliseconds{500}, milliseconds{1'000},
                                           milliseconds{2'000}};
/// A supervisor that lived this long has adopted its workers, and the delays start over: one that
/// dies of a client's request must not delay the next one for other clients.
inline constexpr milliseconds supervisor_settled{1'000};

/// Children reaped per turn of the event loop.
inline constexpr int reaps_per_turn = 256;
/// Requests served per turn of the event loop.
inline constexpr int requests_per_turn = 64;

/// Packets read from a supervisor that hung up; more than a socket buffer can hold.
inline constexpr int last_words_max = 1024;

/// The OOM killer prefers the keeper this much less than the process that started it, and each
/// worker this much more; units of oom_score_adj: thousandths of all memory.
inline constexpr int oom_score_keeper = -500;
inline constexpr int oom_score_worker = +1;

/// One line on standard error. At most PIPE_BUF: a writable pipe takes it without blocking.
inline constexpr std::size_t log_line_bytes_max = 512;
/// One status message to the service manager.
inline constexpr std::size_t status_bytes_max = 256;

}  // namespace bulkhead::keeper::limits

#pragma once

/// All bounds of the supervisor: waits, queues, sizes. The fleet file sets the others.

#include <chrono>
#include <cstddef>
#include <cstdint>

namespace bulkhead::supervisor::limits {

using namespace std::chrono_literals;

// --- control socket
inline constexpr std::size_t control_connections_max = 1'024;
/// Per user, so that root can still connect when the daemon's own user has filled its share.
inline constexpr std::size_t control_connections_per_uid_max = 1'000;
/// A request, with its newline.
inline constexpr std::size_t control_line_bytes_max = 64 * 1024;
/// An answer, with its newline.
inline constexpr std::size_t control_answer_bytes_max = 1024 * 1024;
/// Unsent bytes per connection: one largest answer. A slower reader is disconnected.
inline constexpr std::size_t control_outbox_bytes_max = control_answer_bytes_max;
inline constexpr std::size_t control_requests_max = 64;  ///< unanswered, per connection
inline constexpr auto control_line_deadline = 5s;        ///< from a line's first byte
                                                         ///< to its newline
inline constexpr std::size_t control_accepts_per_turn = 64;
inline constexpr std::size_t control_lines_per_turn = 32;
inline constexpr auto control_accept_pause = 100ms;  ///< when even the reserve
                                                     ///< descriptor does not help
inline constexpr auto control_flush_deadline = 1s;   ///< for the last answers when the daemon stops

// --- links to keeper and workers
inline constexpr std::size_t link_outbox_packets_max = 1'024;
inline constexpr std::size_t link_packets_per_turn = 16;
/// Packets that a dead peer may have left: more than a socket buffer holds.
inline constexpr std::size_t link_packets_left_max = 4'096;

// --- work off the loop
inline constexpr std::size_t blocking_requests_max = 64;  ///< jobs on behalf of clients
/// For one job, which waits for disks, /proc and, for up to three seconds, a driver.
inline constexpr auto blocking_job_deadline = 10s;
inline constexpr std::size_t blocking_stuck_max = 8;  ///< threads stuck in the kernel

// --- life of a worker
inline constexpr std::size_t load_waiters_max = 1'024;  ///< callers that wait for one replica
inline constexpr auto settle_deadline = 2s;             ///< from reaping until memory must be
                                                        ///< verified to be back
inline constexpr auto settle_poll = 20ms;
/// Difference of two readings that count as equal.
inline constexpr std::uint64_t settle_gpu_noise_bytes = 1 << 20;
/// From reaping until missing GPU memory must be back: an earlier restart would run out of memory.
inline constexpr auto settle_gpu_deadline = 10s;
/// The driver's own memory varies by this much when contexts are created and destroyed.
inline constexpr std::uint64_t gpu_overhead_noise_bytes = 32 << 20;
/// A worker enforces its drain deadline itself and tells its clients; the supervisor waits
/// this much longer.
inline constexpr auto drain_grace = 500ms;
/// From the end of a draining worker's link to its exit, which says how it ended.
inline constexpr auto link_end_grace = 2s;
/// Wait for room of a load without a deadline: at most five turns of other models and its own load.
inline constexpr auto room_wait_max = 5min;
inline constexpr auto look_at_others_every = 5s;  ///< interval of looks at other programs' use, if
                                                  ///< a device has a limit
/// Beyond a process' memory and a quarter of it.
inline constexpr std::uint64_t memory_bound_margin = 64 << 20;
inline constexpr auto near_look_every = 10s;         ///< interval of looks at the page cache
inline constexpr auto near_look_while_reading = 1s;  ///< while a look cannot request
                                                     ///< all reads at once
inline constexpr std::uint64_t near_read_max = 256 << 20;
/// Of a supervisor that ends, for a running look.
inline constexpr auto near_end_patience = 200ms;
inline constexpr auto sample_loading_every = 100ms;  ///< memory of a loading process
inline constexpr auto sample_busy_every = 1s;        ///< memory of a serving process, while
                                                     ///< a request runs
inline constexpr auto note_use_every = 1s;           ///< interval of records of a model's last use
inline constexpr auto sample_deadline = 500ms;       ///< reading host memory before a drain;
                                                     ///< 23 ms for 4 GiB
inline constexpr auto killed_alive_max = 10s;        ///< after SIGKILL; then a person is told
inline constexpr auto statistics_deadline = 200ms;
/// After a SIGKILL past the keeper.
inline constexpr auto kill_repeated_grace = 1s;
/// From the end of the keeper's link to the signal of its death; a living keeper kills sooner
/// or waits longer.
inline constexpr auto keeper_death_wait = 1s;
inline constexpr std::size_t package_files_max = 1024;  ///< files looked at in a generating
                                                        ///< model's folder
inline constexpr std::size_t keeper_file_bytes_max = 16 << 20;
inline constexpr std::size_t manifest_bytes_max = 4 << 20;  ///< of a generating model
inline constexpr auto progress_interval = 50ms;             ///< between events within one phase
inline constexpr std::uint32_t link_complaints_max = 5;     ///< log lines about bad
                                                            ///< packets of one worker

// --- processes without a model
inline constexpr auto blank_pause = 1s;            ///< from a load that took one, or a lack of
                                                   ///< room, to the next start
inline constexpr auto blank_retry = 5s;            ///< from a death or a failed start to
                                                   ///< the next start
inline constexpr int blank_retries_longer = 6;     ///< doublings of that pause, one for each
                                                   ///< failure in a row
inline constexpr auto blank_start_deadline = 60s;  ///< for its hello; then it is ended
                                                   ///< instead of taken
/// Assumed for a GPU until one was measured: a context takes 100 to 550 MiB.
inline constexpr std::uint64_t blank_context_bytes = 550 << 20;

// --- hangs
inline constexpr auto answer_deadline = 5s;    ///< for any answer of a worker's loop, which
                                               ///< never computes
inline constexpr auto hang_grace = 2s;         ///< beyond the request deadline: the worker may
                                               ///< report it first
inline constexpr auto look_interval_min = 1s;  ///< between two looks at the page of a busy worker
inline constexpr auto own_sleep = 1s;          ///< a timer this late shows that the
                                               ///< supervisor was stopped
inline constexpr auto abort_grace = 2s;        ///< from SIGABRT, for a backtrace, to SIGKILL

// --- crashes
/// From the report of a fatal signal to the end; then SIGKILL.
inline constexpr auto dying_deadline = 2s;
/// The same, if the kernel may write a core file.
inline constexpr auto core_dump_deadline = 60s;
inline constexpr std::int64_t gpu_evidence_window_ms = 5'000;  ///< before the first sign of a death
/// Files kept; the oldest are removed.
inline constexpr std::size_t crash_reports_max = 64;
inline constexpr std::size_t crash_report_bytes_max = 256 * 1024;
inline constexpr std::size_t crash_log_lines_max = 100;
inline constexpr std::size_t crash_printed_lines_max = 1'000;  ///< of a Python traceback
inline constexpr std::size_t crash_frames_max = 64;
inline constexpr std::size_t crash_demangled_bytes_max = 100;  ///< of a mangled symbol
inline constexpr std::size_t crash_frame_bytes_max = 1024;
inline constexpr std::size_t crash_list_default = 10;

// --- a new supervisor
/// For its program's answer before a hand-over.
inline constexpr auto next_supervisor_deadline = 5s;
inline constexpr std::size_t next_supervisor_words_max = 64 * 1024;
/// For a worker's answer; then it hangs.
inline constexpr auto adoption_deadline = 5s;
/// Supervisors that died adopting it; then it is killed.
inline constexpr std::uint32_t adoptions_tried_max = 3;
inline constexpr std::size_t log_read_back_bytes = 64 << 10;  ///< of each model's log file

// --- restarts
inline constexpr auto restart_delay_first = 250ms;  ///< for the second unforgiven crash; after the
                                                    ///< first, no delay
inline constexpr auto restart_delay_max = 30s;
inline constexpr double restart_jitter = 0.2;
inline constexpr auto restart_forgiven_per = 5min;  ///< of readiness
inline constexpr std::uint32_t restart_unforgiven_max = 5;

// --- GPUs
inline constexpr auto gpu_answer_deadline = 3s;  ///< for the driver; a first question may
                                                 ///< wake the device
inline constexpr auto gpu_reopen_pause = 10s;    ///< between two starts of NVML while a GPU is lost
inline constexpr auto gpu_retry = 5s;            ///< for a model that waits for a
                                                 ///< quarantined or lost GPU
inline constexpr auto gpu_search_first = 1s;     ///< for a driver that did not list the
                                                 ///< fleet's GPUs; doubles
inline constexpr auto gpu_search_last = 60s;
inline constexpr auto gpu_failures_window = 60s;
inline constexpr std::size_t gpu_failures_max = 3;      ///< different models failing in the window:
                                                        ///< the GPU's fault
inline constexpr std::size_t gpu_events_kept = 64;      ///< of one GPU
inline constexpr std::size_t gpu_events_per_read = 32;  ///< taken from the driver at once

// --- logs
inline constexpr std::size_t log_line_bytes_max = 4 * 1024;
inline constexpr std::size_t log_lines_kept = 2'000;    ///< per model, in memory
inline constexpr std::size_t log_bytes_kept = 1 << 20;  ///< per model, in memory
inline constexpr std::size_t log_file_bytes_max = 1 << 20;
inline constexpr std::size_t log_files_kept = 2;
inline constexpr auto log_budget_window = 1s;
inline constexpr std::size_t log_lines_per_window = 1'000;  ///< per worker; the others
                                                            ///< are only counted
inline constexpr std::size_t log_bytes_per_window = 256 * 1024;
inline constexpr std::size_t log_read_bytes = 64 * 1024;
inline constexpr std::size_t log_reads_per_turn = 4;
inline constexpr std::size_t log_tail_default = 100;
inline constexpr std::size_t log_waiting_bytes_max = 4 << 20;  ///< unwritten lines of all models
inline constexpr std::size_t log_batch_bytes_max = 64 << 10;   ///< per write, if more waits
inline constexpr auto log_flush_deadline = 1s;                 ///< when the supervisor ends

/// Clients that map device memory, as one worker reports.
inline constexpr std::size_t importers_max = 64;

// --- reading /proc
inline constexpr std::size_t proc_file_bytes_max = 64 << 20;  ///< maps of one process
inline constexpr std::size_t environ_bytes_max = 4 << 20;
inline constexpr std::size_t gpu_processes_max = 4'096;

}  // namespace bulkhead::supervisor::limits

#pragma once

/// Every number that bounds the supervisor: waits, queues, sizes. What a fleet file sets is not here.

#include <chrono>
#include <cstddef>
#include <cstdint>

namespace bulkhead::supervisor::limits {

using namespace std::chrono_literals;

// --- control socket
inline constexpr std::size_t control_connections_max = 1'024;
/// Of one user, so that root still gets in where the daemon's own user has filled its share.
inline constexpr std::size_t control_connections_per_uid_max = 1'000;
inline constexpr std::size_t control_line_bytes_max = 64 * 1024;      ///< a request, with its newline
inline constexpr std::size_t control_answer_bytes_max = 1024 * 1024;  ///< an answer, with its newline
/// What may wait for a slow reader: one largest answer. Who lets more wait is closed.
inline constexpr std::size_t control_outbox_bytes_max = control_answer_bytes_max;
inline constexpr std::size_t control_requests_max = 64;  ///< of one connection, unanswered
inline constexpr auto control_line_deadline = 5s;        ///< from a line's first byte to its newline
inline constexpr std::size_t control_accepts_per_turn = 64;
inline constexpr std::size_t control_lines_per_turn = 32;
inline constexpr auto control_accept_pause = 100ms;  ///< when not even the reserve descriptor helps
inline constexpr auto control_flush_deadline = 1s;   ///< last answers, when the daemon stops

// --- links to keeper and workers
inline constexpr std::size_t link_outbox_packets_max = 1'024;
inline constexpr std::size_t link_packets_per_turn = 16;
/// Packets a dead peer has left behind: more than a socket buffer holds.
inline constexpr std::size_t link_packets_left_max = 4'096;

// --- what is done off the loop
inline constexpr std::size_t off_loop_requests_max = 64;  ///< jobs on behalf of clients
/// Of one job, which waits for disks, /proc and, three seconds at most, for a driver.
inline constexpr auto off_loop_job_deadline = 10s;
inline constexpr std::size_t off_loop_stuck_max = 8;  ///< threads that do not come back from the kernel

// --- life of a worker
inline constexpr std::size_t load_waiters_max = 1'024;  ///< callers that wait for one replica
inline constexpr auto settle_deadline = 2s;  ///< from reaping until memory must be seen to be back
inline constexpr auto settle_poll = 20ms;
inline constexpr std::uint64_t settle_gpu_noise_bytes = 1 << 20;  ///< between two equal readings
/// From reaping until a GPU's memory that is known to be missing must be back: a restart that comes sooner runs out of
/// it.
inline constexpr auto settle_gpu_deadline = 10s;
/// What a driver keeps for itself beside all processes' figures varies by this much when contexts come and go.
inline constexpr std::uint64_t gpu_overhead_noise_bytes = 32 << 20;
/// A worker keeps its drain deadline itself, and tells its clients so; only then is it hurried.
inline constexpr auto drain_grace = 500ms;
/// From the end of a draining worker's link to its exit, which tells how it ended.
inline constexpr auto link_end_grace = 2s;
/// Of a load without a deadline, until there is room: as long as five turns of others at most, and its own load.
inline constexpr auto room_wait_max = 5min;
inline constexpr auto look_at_others_every = 5s;  ///< at what other programs use, where a device has a limit
inline constexpr std::uint64_t memory_bound_margin = 64 << 20;  ///< beyond a process' memory and a quarter of it
inline constexpr auto near_look_every = 10s;        ///< at which files are in the page cache
inline constexpr auto near_look_while_reading = 1s;  ///< while more is to be read than one look asks for
inline constexpr std::uint64_t near_read_max = 256 << 20;
inline constexpr auto near_end_patience = 200ms;  ///< for a look under way when the supervisor ends
inline constexpr auto sample_loading_every = 100ms;  ///< memory of a process that loads
inline constexpr auto sample_busy_every = 1s;        ///< and of one that serves, while a request runs
inline constexpr auto note_use_every = 1s;           ///< to the keeper, when a model was last in use
inline constexpr auto sample_deadline = 500ms;  ///< reading host memory before a drain; 23 ms for 4 GiB
inline constexpr auto killed_alive_max = 10s;   ///< after SIGKILL; then a person is told
inline constexpr auto statistics_deadline = 200ms;
/// After a SIGKILL that did not go through the keeper.
inline constexpr auto kill_repeated_grace = 1s;
/// From the end of the keeper's link to the signal of its death; a keeper that lives kills sooner or waits longer.
inline constexpr auto keeper_death_wait = 1s;
inline constexpr std::size_t package_files_max = 1024;  ///< of a generating model's folder, that are looked at
inline constexpr std::size_t manifest_bytes_max = 4 << 20;  ///< of its manifest
inline constexpr auto progress_interval = 50ms;          ///< of events within one phase
inline constexpr std::uint32_t link_complaints_max = 5;  ///< log lines on one worker's bad packets

// --- processes without a model
inline constexpr auto blank_pause = 1s;            ///< from a load that took one, or a lack of room, to the next
inline constexpr auto blank_retry = 5s;            ///< from the death of one, or a failed start, to the next
inline constexpr int blank_retries_longer = 6;     ///< each failure in a row doubles that, so often
inline constexpr auto blank_start_deadline = 60s;  ///< for its hello; who is later is ended instead of taken
/// Of a GPU, until one was measured: a context has 100 to 550 MiB.
inline constexpr std::uint64_t blank_context_bytes = 550 << 20;

// --- hangs
inline constexpr auto answer_deadline = 5s;    ///< of a worker's loop, which never computes, for whatever it is asked
inline constexpr auto hang_grace = 2s;         ///< beyond the request deadline: the worker's own word comes first
inline constexpr auto look_interval_min = 1s;  ///< between two looks at the page of a busy worker
inline constexpr auto own_sleep = 1s;          ///< this late, the supervisor itself had stopped: nobody is judged
inline constexpr auto abort_grace = 2s;        ///< from SIGABRT, for a backtrace, to SIGKILL

// --- crashes
inline constexpr auto dying_deadline = 2s;       ///< from the word of a fatal signal to the end; then SIGKILL
inline constexpr auto core_dump_deadline = 60s;  ///< instead, where a core file may be written
inline constexpr std::int64_t gpu_evidence_window_ms = 5'000;  ///< before the first sign of a death
inline constexpr std::size_t crash_reports_max = 64;           ///< files kept; the oldest go
inline constexpr std::size_t crash_report_bytes_max = 256 * 1024;
inline constexpr std::size_t crash_log_lines_max = 100;
inline constexpr std::size_t crash_printed_lines_max = 1'000;  ///< of a traceback of Python
inline constexpr std::size_t crash_frames_max = 64;
inline constexpr std::size_t crash_demangled_bytes_max = 100;  ///< of a mangled symbol
inline constexpr std::size_t crash_frame_bytes_max = 1024;
inline constexpr std::size_t crash_list_default = 10;

// --- a new supervisor
inline constexpr auto next_supervisor_deadline = 5s;          ///< for its program's answer before a hand-over
inline constexpr std::size_t next_supervisor_words_max = 4 * 1024;
inline constexpr auto adoption_deadline = 5s;                 ///< for a worker's answer; then it hangs
inline constexpr std::uint32_t adoptions_tried_max = 3;       ///< supervisors that died of one; then it is killed
inline constexpr std::size_t log_read_back_bytes = 64 << 10;  ///< of each model's log file

// --- restarts
inline constexpr auto restart_delay_first = 250ms;  ///< of the second unforgiven crash; the first waits for nothing
inline constexpr auto restart_delay_max = 30s;
inline constexpr double restart_jitter = 0.2;
inline constexpr auto restart_forgiven_per = 5min;  ///< of readiness
inline constexpr std::uint32_t restart_unforgiven_max = 5;

// --- GPUs
inline constexpr auto gpu_answer_deadline = 3s;  ///< of the driver; a first question may wake the device
inline constexpr auto gpu_reopen_pause = 10s;    ///< between two starts of NVML, while a GPU is lost
inline constexpr auto gpu_retry = 5s;            ///< of a model that waits for a quarantined or lost GPU
inline constexpr auto gpu_failures_window = 60s;
inline constexpr std::size_t gpu_failures_max = 3;      ///< different models failing in that time: it is the GPU
inline constexpr std::size_t gpu_events_kept = 64;      ///< of one GPU
inline constexpr std::size_t gpu_events_per_read = 32;  ///< taken from the driver at once

// --- logs
inline constexpr std::size_t log_line_bytes_max = 4 * 1024;
inline constexpr std::size_t log_lines_kept = 2'000;    ///< per model, in memory
inline constexpr std::size_t log_bytes_kept = 1 << 20;  ///< per model, in memory
inline constexpr std::size_t log_file_bytes_max = 1 << 20;
inline constexpr std::size_t log_files_kept = 2;
inline constexpr auto log_budget_window = 1s;
inline constexpr std::size_t log_lines_per_window = 1'000;  ///< of one worker; the rest is counted
inline constexpr std::size_t log_bytes_per_window = 256 * 1024;
inline constexpr std::size_t log_read_bytes = 64 * 1024;
inline constexpr std::size_t log_reads_per_turn = 4;
inline constexpr std::size_t log_tail_default = 100;
inline constexpr std::size_t log_waiting_bytes_max = 4 << 20;  ///< to be written, of all models
inline constexpr std::size_t log_batch_bytes_max = 64 << 10;   ///< written at once, where more waits
inline constexpr auto log_flush_deadline = 1s;                 ///< when the supervisor ends

/// Clients that one worker says map its device memory.
inline constexpr std::size_t importers_max = 64;

// --- what is read from /proc
inline constexpr std::size_t proc_file_bytes_max = 64 << 20;  ///< maps of one process
inline constexpr std::size_t environ_bytes_max = 4 << 20;
inline constexpr std::size_t gpu_processes_max = 4'096;

}  // namespace bulkhead::supervisor::limits

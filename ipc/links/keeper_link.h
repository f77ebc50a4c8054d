#pragma once

/// The link between keeper and supervisor: fixed binary packets over SOCK_SEQPACKET, so that the
/// keeper needs no parser and no allocator. Described in `docs/keeper-link.md`. Both ends run on
/// one machine but may be of two releases: each opens with a hello that carries a version range.

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <type_traits>

namespace bulkhead::keeper_link {

inline constexpr std::uint16_t version_min = 1;
inline constexpr std::uint16_t version_max = 1;

inline constexpr std::size_t workers_max = 256;
inline constexpr std::size_t ledger_bytes_max = 1024;      ///< opaque to the keeper, one per worker
inline constexpr std::size_t spawn_bytes_max = 56 * 1024;  ///< argv and environment together

enum class Type : std::uint16_t {
    // keeper → supervisor
    hello = 1,         ///< KeeperHello; `worker_count` packets of `worker` follow, then `hello_end`
    worker = 2,        ///< WorkerRecord + ledger bytes; fds of a running worker: pidfd, link, log;
                       ///< of a dead one whose end was not reported: link, log; else none
    hello_end = 3,     ///< no body
    spawned = 4,       ///< Spawned; fds: pidfd, link, log
    spawn_failed = 5,  ///< SpawnFailed
    exited = 6,        ///< Exited: reaped, its process group killed and reaped
    stop_asked = 7,    ///< no body: SIGTERM or SIGINT reached the keeper: unload all, then `stop`
    reload_asked = 8,  ///< no body: SIGHUP reached the keeper
    // supervisor → keeper
    supervisor_hello = 32,  ///< SupervisorHello
    spawn = 33,             ///< Spawn + argv and environment; fds: cgroup directory, if any
    signal = 34,            ///< Signal
    ledger = 35,            ///< WorkerKey + ledger bytes: replaces the worker's blob
    forget = 36,            ///< WorkerKey: drops the record of a dead worker
    stop = 37,              ///< no body: everything is unloaded: the keeper removes the
                            ///< socket and ends
    hand_over = 38,         ///< no body: this supervisor ends on purpose; the next starts at once
    upgrade = 39,           ///< no body: as hand_over, but the keeper re-executes its
                            ///< own program first
    reload_done = 40,       ///< no body: answers reload_asked if this supervisor stays: the file
                            ///< was refused, or changes nothing; not sent before a hand-over
};

struct Header {
    std::uint16_t type;
    std::uint16_t version;
    std::uint32_t size_bytes;  ///< of the whole packet
    std::uint64_t request_id;  ///< echoed in spawned and spawn_failed
};

/// The key of a worker everywhere.
struct WorkerKey {
    std::array<char, 64> model;
    std::uint32_t replica;
    std::uint32_t reserved;
    std::uint64_t generation;  ///< rises with every spawn of the daemon; never reused
    friend bool operator==(const WorkerKey&, const WorkerKey&) = default;
};

/// Why the keeper's last attempt to re-execute its program failed; the old program went on.
enum class UpgradeFailure : std::uint16_t {
    none = 0,
    state = 1,    ///< the state could not be written
    refused = 2,  ///< the installed program could not be started, or rejects the state
    execute = 3,  ///< execve
};

struct KeeperHello {
    std::uint16_t version_min;
    std::uint16_t version_max;
    std::uint32_t worker_count;
    std::uint64_t generation_last;    ///< highest one ever spawned
    std::uint64_t supervisor_starts;  ///< 1 for the first supervisor
    std::uint64_t started_unix_ms;    ///< when the keeper started
    std::int32_t keeper_pid;
    std::uint16_t executions;      ///< how often the keeper has re-executed its program; 0 from
                                   ///< an older keeper
    std::uint16_t upgrade_failed;  ///< UpgradeFailure of the last `upgrade`
};

struct SupervisorHello {
    std::uint16_t version_min;
    std::uint16_t version_max;
    std::uint32_t reserved;
};

enum class WorkerFate : std::uint32_t { running = 0, exited = 1, killed_by_signal = 2 };

struct WorkerRecord {
    WorkerKey key;
    std::int32_t pid;
    std::uint32_t fate;          ///< WorkerFate
    std::int32_t exit_number;    ///< exit code or signal
    std::uint32_t ledger_bytes;  ///< of the ledger after this struct
    std::uint64_t spawned_unix_ms;
    std::uint32_t group_empty;  ///< as in Exited; 0 while it runs
    std::uint32_t reserved;
};

struct Spawned {
    WorkerKey key;
    std::int32_t pid;
    std::uint32_t reserved;
};

/// The step at which a spawn failed; everything before it was rolled back.
enum class SpawnStep : std::uint32_t {
    none = 0,
    table_full = 1,
    socket_pair = 2,
    log_pipe = 3,
    clone = 5,
    process_group = 6,
    parent_death_signal = 7,
    descriptors = 8,
    limits = 9,
    exec = 11,
};

struct SpawnFailed {
    WorkerKey key;
    std::uint32_t step;  ///< SpawnStep
    std::int32_t error_number;
};

struct Exited {
    WorkerKey key;
    std::int32_t pid;
    std::uint32_t fate;  ///< WorkerFate, never running
    std::int32_t exit_number;
    std::uint32_t group_empty;  ///< 1: the process group was seen empty after reaping
};

/// `bytes` of zero-terminated strings follow: argv, then environment.
struct Spawn {
    WorkerKey key;
    std::uint32_t argv_count;
    std::uint32_t environment_count;
    std::uint32_t bytes;
    std::uint32_t has_cgroup;      ///< 1: brings one fd; the child starts inside it
    std::uint64_t core_bytes_max;  ///< RLIMIT_CORE
    std::uint64_t reserved;
};

struct Signal {
    WorkerKey key;
    std::int32_t number;
    std::uint32_t whole_group;  ///< 1: the worker's process group; 0: the worker alone, by pidfd
};

template <typename T, std::size_t size>
inline constexpr bool is_wire_struct = std::is_trivially_copyable_v<T>&& std::has_unique_object_representations_v<T> &&
                                       sizeof(T) == size;

static_assert(is_wire_struct<Header, 16>);
static_assert(is_wire_struct<WorkerKey, 80>);
static_assert(is_wire_struct<KeeperHello, 40>);
static_assert(is_wire_struct<SupervisorHello, 8>);
static_assert(is_wire_struct<WorkerRecord, 112>);
static_assert(is_wire_struct<Spawned, 88>);
static_assert(is_wire_struct<SpawnFailed, 88>);
static_assert(is_wire_struct<Exited, 96>);
static_assert(is_wire_struct<Spawn, 112>);
static_assert(is_wire_struct<Signal, 88>);

template <typename T>
std::span<const std::byte> as_packet_bytes(const T& value) noexcept {
    static_assert(std::has_unique_object_representations_v<T>);
    return std::as_bytes(std::span{&value, 1});
}

/// Copies the struct from the front of `bytes` and removes it; empty if there are too few bytes.
template <typename T>
std::optional<T> take(std::span<const std::byte>& bytes) noexcept {
    static_assert(std::has_unique_object_representations_v<T>);
    if (bytes.size() < sizeof(T)) return std::nullopt;
    T value;
    std::memcpy(&value, bytes.data(), sizeof(T));
    bytes = bytes.subspan(sizeof(T));
    return value;
}

/// Descriptors that are open in a child, besides 0 (/dev/null), 1 and 2 (its log pipe).
inline constexpr int child_link_fd = 3;
/// The listening control socket; only in the supervisor.
inline constexpr int child_listen_fd = 4;

}  // namespace bulkhead::keeper_link

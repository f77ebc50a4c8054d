#include "supervisor/keeper/state/saved_state.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>

#include "supervisor/keeper/base/packet_socket.h"

namespace bulkhead::keeper {
namespace {

constexpr std::array<char, 8> state_magic{'b', 'u', 'l', 'k', 'h', 'e', 'a', 'd'};
constexpr int seals = F_SEAL_WRITE | F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_SEAL;
Error senseless(const std::string& what) {
    return Error{ErrorCode::protocol_violation, "reading the state of the keeper before this one: " + what,
                 "install bulkheadd and bulkhead-supervisor of one release, not older than the one that ran, and start "
                 "the daemon again"};
}

/// Returns true if everything was written.
bool write_parts(int fd, std::span<const std::byte> first, std::span<const std::byte> second) noexcept {
    const std::array<iovec, 2> parts{
        {{const_cast<std::byte*>(first.data()), first.size()}, {const_cast<std::byte*>(second.data()), second.size()}}};
    const ssize_t written = ::writev(fd, parts.data(), parts.size());
    if (written >= 0 && static_cast<std::size_t>(written) != first.size() + second.size()) errno = ENOSPC;
    return written >= 0 && static_cast<std::size_t>(written) == first.size() + second.size();
}

SavedWorker saved(const Worker& worker, std::size_t ledger_bytes) noexcept {
    const auto deadline =
        std::chrono::duration_cast<std::chrono::nanoseconds>(worker.group_deadline.time_since_epoch());
    return {.key = worker.key,
            .pid = worker.pid,
            .state = static_cast<std::uint32_t>(worker.state),
            .fate = static_cast<std::uint32_t>(worker.fate),
            .exit_number = worker.exit_number,
            .exit_due = worker.exit_due ? 1U : 0U,
            .group_empty = worker.group_empty ? 1U : 0U,
            .pidfd = worker.pidfd.get(),
            .link = worker.link.get(),
            .log = worker.log.get(),
            .ledger_bytes = static_cast<std::uint32_t>(ledger_bytes),
            .spawned_unix_ms = worker.spawned_unix_ms,
            .group_deadline_ns = deadline.count()};
}

}  // namespace

UniqueFd write_state(SavedKeeper saved_keeper, const std::string& socket_path, WorkerTable& table) noexcept {
    UniqueFd memfd{::memfd_create("bulkheadd-state", MFD_CLOEXEC | MFD_ALLOW_SEALING)};
    if (!memfd) return {};
    StateHeader header{.magic = state_magic,
                       .version = state_version,
                       .keeper_bytes = sizeof(SavedKeeper),
                       .worker_bytes = sizeof(SavedWorker),
                       .worker_count = table.count(),
                       .size_bytes = sizeof header + sizeof saved_keeper + socket_path.size()};
    for (const Worker& worker : table.all())
        if (worker.state != Worker::State::free) header.size_bytes += sizeof(SavedWorker) + table.ledger(worker).size();
    saved_keeper.socket_path_bytes = static_cast<std::uint32_t>(socket_path.size());

    const auto path = std::as_bytes(std::span{socket_path});
    if (!write_parts(memfd.get(), as_packet_bytes(header), as_packet_bytes(saved_keeper)) ||
        !write_parts(memfd.get(), path, {}))
        return {};
    for (const Worker& worker : table.all()) {
        if (worker.state == Worker::State::free) continue;
        const auto ledger = table.ledger(worker);
        const SavedWorker fixed = saved(worker, ledger.size());
        if (!write_parts(memfd.get(), as_packet_bytes(fixed), ledger)) return {};
    }
    if (::fcntl(memfd.get(), F_ADD_SEALS, seals) != 0) return {};
    return memfd;
}

Result<Mapping> map_state(int memfd) {
    if (const int found = ::fcntl(memfd, F_GET_SEALS); found < 0 || (found & seals) != seals)
        return senseless("descriptor " + std::to_string(memfd) + " is not a sealed memfd");
    struct stat facts {};
    if (::fstat(memfd, &facts) != 0) return system_error("looking at the state of the keeper before this one", errno);
    const auto size = static_cast<std::size_t>(facts.st_size);
    if (size < sizeof(StateHeader)) return senseless("it is too short");
    Mapping bytes{size, PROT_READ, MAP_PRIVATE, memfd};
    if (!bytes) return system_error("mapping the state of the keeper before this one", errno);
    return bytes;
}

Result<SavedState> parse_state(std::span<const std::byte> bytes) {
    const std::size_t size_bytes = bytes.size();
    const auto header = take<StateHeader>(bytes);
    if (!header || header->magic != state_magic) return senseless("it does not begin as a state does");
    if (header->version != state_version)
        return senseless("it has version " + std::to_string(header->version) + ", and this release reads " +
                         std::to_string(state_version));
    if (header->size_bytes != size_bytes || header->keeper_bytes != sizeof(SavedKeeper) ||
        header->worker_bytes != sizeof(SavedWorker) || header->worker_count > keeper_link::workers_max)
        return senseless("its header does not fit it");

    SavedState state;
    const auto keeper = take<SavedKeeper>(bytes);
    if (!keeper || keeper->socket_path_bytes > bytes.size()) return senseless("it ends within the keeper's part");
    state.keeper = *keeper;
    state.socket_path.assign(reinterpret_cast<const char*>(bytes.data()), keeper->socket_path_bytes);
    bytes = bytes.subspan(keeper->socket_path_bytes);
    for (std::uint32_t i = 0; i < header->worker_count; ++i) {
        const auto worker = take<SavedWorker>(bytes);
        if (!worker || worker->ledger_bytes > std::min<std::size_t>(bytes.size(), keeper_link::ledger_bytes_max))
            return senseless("it ends within a worker");
        state.workers.push_back({*worker, bytes.first(worker->ledger_bytes)});
        bytes = bytes.subspan(worker->ledger_bytes);
    }
    if (!bytes.empty()) return senseless("something follows its last worker");
    return state;
}

void adopt_workers(const SavedState& state, WorkerTable& table) noexcept {
    for (const auto& [fixed, ledger] : state.workers) {
        for (const int fd : {fixed.pidfd, fixed.link, fixed.log})
            if (fd >= 0) ::fcntl(fd, F_SETFD, FD_CLOEXEC);

        Worker& worker = *table.free_slot();  // there are no more workers than slots:
                                              // checked before
        worker.state = static_cast<Worker::State>(fixed.state);
        worker.exit_due = fixed.exit_due == 1;
        worker.group_empty = fixed.group_empty == 1;
        worker.fate = static_cast<WorkerFate>(fixed.fate);
        worker.exit_number = fixed.exit_number;
        worker.pid = fixed.pid;
        worker.key = fixed.key;
        worker.pidfd = UniqueFd{fixed.pidfd};
        worker.link = UniqueFd{fixed.link};
        worker.log = UniqueFd{fixed.log};
        worker.spawned_unix_ms = fixed.spawned_unix_ms;
        worker.group_deadline = Clock::time_point{std::chrono::nanoseconds{fixed.group_deadline_ns}};
        table.set_ledger(worker, ledger);
    }
}

}  // namespace bulkhead::keeper

#include "supervisor/keeper/state/worker_table.h"

#include <algorithm>
#include <cstring>

namespace bulkhead::keeper {

bool is_name(const WorkerKey& key) noexcept {
    return key.model.front() != '\0' && std::ranges::find(key.model, '\0') != key.model.end();
}

void Worker::end_was_told() noexcept {
    exit_due = false;
    pidfd.reset();
    link.reset();
    log.reset();
}

Worker* WorkerTable::free_slot() noexcept {
    const auto slot = std::ranges::find(workers_, Worker::State::free, &Worker::state);
    if (slot == workers_.end()) return nullptr;
    set_ledger(*slot, {});
    return &*slot;
}

Worker* WorkerTable::find(const WorkerKey& key) noexcept {
    const auto slot = std::ranges::find_if(
        workers_, [&](const Worker& worker) { return worker.state != Worker::State::free && worker.key == key; });
    return slot == workers_.end() ? nullptr : &*slot;
}

Worker* WorkerTable::find_running(pid_t pid) noexcept {
    const auto slot = std::ranges::find_if(
        workers_, [&](const Worker& worker) { return worker.state == Worker::State::running && worker.pid == pid; });
    return slot == workers_.end() ? nullptr : &*slot;
}

void WorkerTable::set_ledger(const Worker& worker, std::span<const std::byte> blob) noexcept {
    const std::size_t slot = index_of(worker);
    const std::size_t size = std::min(blob.size(), ledgers_[slot].size());
    if (size != 0) std::memcpy(ledgers_[slot].data(), blob.data(), size);
    ledger_sizes_bytes_[slot] = static_cast<std::uint32_t>(size);
}

std::span<const std::byte> WorkerTable::ledger(const Worker& worker) const noexcept {
    const std::size_t slot = index_of(worker);
    return std::span{ledgers_[slot]}.first(ledger_sizes_bytes_[slot]);
}

void WorkerTable::forget(Worker& worker) noexcept { worker = Worker{}; }

std::uint32_t WorkerTable::count() const noexcept {
    return static_cast<std::uint32_t>(
        std::ranges::count_if(workers_, [](const Worker& worker) { return worker.state != Worker::State::free; }));
}

std::size_t WorkerTable::index_of(const Worker& worker) const noexcept {
    return static_cast<std::size_t>(&worker - workers_.data());
}

}  // namespace bulkhead::keeper

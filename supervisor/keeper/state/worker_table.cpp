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

Worker* WorkerTable::free_place() noexcept {
    const auto place = std::ranges::find(workers_, Worker::State::free, &Worker::state);
    if (place == workers_.end()) return nullptr;
    set_ledger(*place, {});
    return &*place;
}

Worker* WorkerTable::find(const WorkerKey& key) noexcept {
    const auto place = std::ranges::find_if(
        workers_, [&](const Worker& worker) { return worker.state != Worker::State::free && worker.key == key; });
    return place == workers_.end() ? nullptr : &*place;
}

Worker* WorkerTable::find_running(pid_t pid) noexcept {
    const auto place = std::ranges::find_if(
        workers_, [&](const Worker& worker) { return worker.state == Worker::State::running && worker.pid == pid; });
    return place == workers_.end() ? nullptr : &*place;
}

void WorkerTable::set_ledger(const Worker& worker, std::span<const std::byte> blob) noexcept {
    const std::size_t place = place_of(worker);
    const std::size_t size = std::min(blob.size(), ledgers_[place].size());
    if (size != 0) std::memcpy(ledgers_[place].data(), blob.data(), size);
    ledger_sizes_bytes_[place] = static_cast<std::uint32_t>(size);
}

std::span<const std::byte> WorkerTable::ledger(const Worker& worker) const noexcept {
    const std::size_t place = place_of(worker);
    return std::span{ledgers_[place]}.first(ledger_sizes_bytes_[place]);
}

void WorkerTable::forget(Worker& worker) noexcept { worker = Worker{}; }

std::uint32_t WorkerTable::count() const noexcept {
    return static_cast<std::uint32_t>(
        std::ranges::count_if(workers_, [](const Worker& worker) { return worker.state != Worker::State::free; }));
}

std::size_t WorkerTable::place_of(const Worker& worker) const noexcept {
    return static_cast<std::size_t>(&worker - workers_.data());
}

}  // namespace bulkhead::keeper

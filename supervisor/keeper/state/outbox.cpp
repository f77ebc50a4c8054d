#include "supervisor/keeper/state/outbox.h"

#include <array>
#include <utility>

namespace bulkhead::keeper {

using keeper_link::Type;

namespace {

/// Returns pidfd, link, log.
std::array<int, 3> descriptors_of(const Worker& worker) noexcept {
    return {worker.pidfd.get(), worker.link.get(), worker.log.get()};
}

/// Selects what a record brings: for a dead worker link and log, unless its end was
/// reported before.
std::span<const int> shared_with_record(const Worker& worker, const std::array<int, 3>& descriptors) noexcept {
    if (worker.state != Worker::State::dead) return descriptors;
    return worker.exit_due ? std::span{descriptors}.subspan(1) : std::span<const int>{};
}

SendOutcome send_record(PacketSocket& socket, WorkerTable& table, Worker& worker) noexcept {
    const bool dead = worker.state == Worker::State::dead;
    const auto ledger = table.ledger(worker);
    keeper_link::WorkerRecord record{};
    record.key = worker.key;
    record.pid = worker.pid;
    record.fate = static_cast<std::uint32_t>(dead ? worker.fate : WorkerFate::running);
    record.exit_number = dead ? worker.exit_number : 0;
    record.ledger_bytes = static_cast<std::uint32_t>(ledger.size());
    record.spawned_unix_ms = worker.spawned_unix_ms;
    record.group_empty = dead && worker.group_empty ? 1 : 0;
    const auto descriptors = descriptors_of(worker);
    const SendOutcome outcome =
        socket.send(Type::worker, 0, as_packet_bytes(record), ledger, shared_with_record(worker, descriptors));
    if (outcome == SendOutcome::sent && dead) worker.end_was_told();
    return outcome;
}

}  // namespace

void Outbox::hand_over(const keeper_link::KeeperHello& hello) noexcept {
    stage_ = Stage::hello;
    hello_ = hello;
    next_record_ = 0;
    answer_ = Answer::none;
}

void Outbox::answer_spawned(std::uint64_t request_id, Worker& worker) noexcept {
    answer_ = Answer::spawned;
    answer_request_id_ = request_id;
    spawned_ = &worker;
}

void Outbox::answer_spawn_failed(std::uint64_t request_id, const keeper_link::SpawnFailed& failed) noexcept {
    answer_ = Answer::spawn_failed;
    answer_request_id_ = request_id;
    failed_ = failed;
}

SendOutcome Outbox::flush(PacketSocket& socket, WorkerTable& table) noexcept {
    SendOutcome outcome = flush_hand_over(socket, table);
    if (outcome == SendOutcome::sent) outcome = flush_answer(socket);
    if (outcome == SendOutcome::sent) outcome = flush_exits(socket, table);
    if (outcome == SendOutcome::sent) outcome = flush_asked(socket);
    return outcome;
}

SendOutcome Outbox::flush_hand_over(PacketSocket& socket, WorkerTable& table) noexcept {
    if (stage_ == Stage::done) return SendOutcome::sent;
    SendOutcome outcome = SendOutcome::sent;
    if (stage_ == Stage::hello) {
        outcome = socket.send(Type::hello, 0, as_packet_bytes(hello_));
        if (outcome != SendOutcome::sent) return outcome;
        stage_ = Stage::workers;
    }
    for (; next_record_ < table.all().size(); ++next_record_) {
        Worker& worker = table.all()[next_record_];
        if (worker.state == Worker::State::free) continue;
        outcome = send_record(socket, table, worker);
        if (outcome != SendOutcome::sent) return outcome;
    }
    outcome = socket.send(Type::hello_end, 0);
    if (outcome == SendOutcome::sent) stage_ = Stage::done;
    return outcome;
}

SendOutcome Outbox::flush_answer(PacketSocket& socket) noexcept {
    SendOutcome outcome = SendOutcome::sent;
    if (answer_ == Answer::spawned) {
        const keeper_link::Spawned spawned{spawned_->key, spawned_->pid, 0};
        outcome =
            socket.send(Type::spawned, answer_request_id_, as_packet_bytes(spawned), {}, descriptors_of(*spawned_));
    } else if (answer_ == Answer::spawn_failed) {
        outcome = socket.send(Type::spawn_failed, answer_request_id_, as_packet_bytes(failed_));
    }
    if (outcome == SendOutcome::sent) answer_ = Answer::none;
    return outcome;
}

SendOutcome Outbox::flush_exits(PacketSocket& socket, WorkerTable& table) noexcept {
    for (Worker& worker : table.all()) {
        if (!worker.exit_due) continue;
        const keeper_link::Exited exited{worker.key, worker.pid, static_cast<std::uint32_t>(worker.fate),
                                         worker.exit_number, worker.group_empty ? 1U : 0U};
        const SendOutcome outcome = socket.send(Type::exited, 0, as_packet_bytes(exited));
        if (outcome != SendOutcome::sent) return outcome;
        worker.end_was_told();
    }
    return SendOutcome::sent;
}

SendOutcome Outbox::flush_asked(PacketSocket& socket) noexcept {
    for (const auto& [due, type] : {std::pair{&stop_due_, Type::stop_asked}, {&reload_due_, Type::reload_asked}}) {
        if (!*due) continue;
        const SendOutcome outcome = socket.send(type, 0);
        if (outcome != SendOutcome::sent) return outcome;
        *due = false;
    }
    return SendOutcome::sent;
}

}  // namespace bulkhead::keeper

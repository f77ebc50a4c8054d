#pragma once

#include <cstddef>
#include <cstdint>

#include "ipc/links/keeper_link.h"
#include "supervisor/keeper/base/packet_socket.h"
#include "supervisor/keeper/state/worker_table.h"

namespace bulkhead::keeper {

/// What the present supervisor has not been told yet.
///
/// Not a queue of packets but a set of facts: each becomes a packet when there is room for one, so
/// nothing is lost and nothing grows when a supervisor does not read. Meanwhile requests wait: the
/// keeper takes the next one when the answer to the last has left.
class Outbox {
public:
    /// For a new supervisor: everything known is due, oldest facts first.
    void hand_over(const keeper_link::KeeperHello& hello) noexcept;

    void answer_spawned(std::uint64_t request_id, Worker& worker) noexcept;
    void answer_spawn_failed(std::uint64_t request_id, const keeper_link::SpawnFailed& failed) noexcept;
    void ask_to_stop() noexcept { stop_due_ = true; }
    void ask_to_reload() noexcept { reload_due_ = true; }

    [[nodiscard]] bool reload_is_due() const noexcept { return reload_due_; }

    /// The hand-over and the last answer have left: the next request may be taken.
    [[nodiscard]] bool takes_requests() const noexcept { return stage_ == Stage::done && answer_ == Answer::none; }

    /// Returns `sent` if nothing is left to send, else why it stopped.
    SendOutcome flush(PacketSocket& socket, WorkerTable& table) noexcept;

private:
    enum class Stage : std::uint8_t { hello, workers, done };
    enum class Answer : std::uint8_t { none, spawned, spawn_failed };

    SendOutcome flush_hand_over(PacketSocket& socket, WorkerTable& table) noexcept;
    SendOutcome flush_answer(PacketSocket& socket) noexcept;
    SendOutcome flush_exits(PacketSocket& socket, WorkerTable& table) noexcept;
    SendOutcome flush_asked(PacketSocket& socket) noexcept;

    Stage stage_ = Stage::done;
    keeper_link::KeeperHello hello_{};
    std::size_t next_record_ = 0;

    Answer answer_ = Answer::none;
    std::uint64_t answer_request_id_ = 0;
    Worker* spawned_ = nullptr;  ///< stays in the table: `forget` is a request, and requests wait
    keeper_link::SpawnFailed failed_{};

    bool stop_due_ = false;
    bool reload_due_ = false;
};

}  // namespace bulkhead::keeper

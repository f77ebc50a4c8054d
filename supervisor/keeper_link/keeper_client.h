#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ipc/links/keeper_link.h"
#include "supervisor/base/packet_link.h"
#include "supervisor/keeper_link/keeper.h"

namespace bulkhead::supervisor {

/// The supervisor's side of the link to the keeper (ipc/links/keeper_link.h).
class KeeperClient : public Keeper {
public:
    struct Handlers {
        /// The keeper has sent its hello and its records of former supervisors' workers.
        std::function<void(const keeper_link::KeeperHello&, std::vector<FoundWorker>)> ready;
        std::function<void()> stop_asked;
        std::function<void()> reload_asked;
        /// The link has ended. Without its keeper the supervisor must end too.
        std::function<void(const Error* why)> closed;
    };

    KeeperClient(boost::asio::io_context& io, UniqueFd link);
    ~KeeperClient() override;
    void start(Handlers handlers);

    void spawn(SpawnRequest request, OnSpawned spawned, OnExited exited) override;
    void adopt(const WorkerName& name, OnExited exited) override;
    void signal(const WorkerName& name, int number, bool whole_group) override;
    void keep(const WorkerName& name, const std::string& ledger) override;
    void forget(const WorkerName& name) override;

    /// Reports that everything is unloaded: the keeper removes the socket and ends.
    void stop();
    /// This supervisor ends on purpose: the keeper starts the next one at once, with `with_keeper`
    /// after re-executing its own program. Workers stay.
    void hand_over(bool with_keeper);
    /// Answers `reload_asked` if this supervisor stays: the file was refused, or nothing changes.
    void reload_done();
    [[nodiscard]] bool is_flushed() const noexcept { return link_->is_flushed(); }

private:
    struct Life {
        OnSpawned spawned;                   ///< empty once called
        OnExited exited;                     ///< empty until a found worker is adopted
        std::optional<ProcessExit> early{};  ///< it ended before that
        std::optional<Error> unreceived{};   ///< lost descriptors: once it ended, the spawn
                                             ///< fails with this
    };

    void on_packet(Packet& packet);
    // Each with the packet: the bytes after its body, and its descriptors.
    void on_hello(const keeper_link::KeeperHello& hello, Packet& packet);
    void on_worker(const keeper_link::WorkerRecord& record, Packet& packet);
    void on_spawned(const keeper_link::Spawned& body, Packet& packet);
    void on_spawn_failed(const keeper_link::SpawnFailed& body, Packet& packet);
    void on_exited(const keeper_link::Exited& body, Packet& packet);
    void on_hello_end();
    void violated(const std::string& what);

    boost::asio::io_context& io_;
    std::shared_ptr<PacketLink> link_;
    Handlers handlers_;
    std::optional<keeper_link::KeeperHello> hello_;
    std::vector<FoundWorker> found_;       ///< until `ready`
    std::map<std::uint64_t, Life> lives_;  ///< by generation
    std::uint64_t last_request_ = 0;
};

}  // namespace bulkhead::supervisor

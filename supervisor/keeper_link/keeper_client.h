#pragma once

#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "ipc/links/keeper_link.h"
#include "supervisor/base/packet_link.h"
#include "supervisor/keeper_link/keeper.h"

namespace bulkhead::supervisor {

/// The link to the keeper (ipc/links/keeper_link.h), spoken from the supervisor's side.
class KeeperClient : public Keeper {
public:
    struct Handlers {
        /// The keeper has said who it is, and what it kept of former supervisors' workers.
        std::function<void(const keeper_link::KeeperHello&, std::vector<FoundWorker>)> ready;
        std::function<void()> stop_asked;
        std::function<void()> reload_asked;
        /// The link has ended: without its keeper a supervisor has nothing to do.
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

    /// Everything is unloaded: the keeper removes the socket and ends.
    void stop();
    /// This supervisor ends now, on purpose: the keeper starts the next one at once, and with `with_keeper` executes
    /// its own program again before that. Workers stay.
    void hand_over(bool with_keeper);
    /// The answer to `reload_asked` where this supervisor stays: refused, or nothing to change.
    void reload_done();
    [[nodiscard]] bool is_flushed() const noexcept { return link_->is_flushed(); }

private:
    struct Life {
        OnSpawned spawned;                   ///< empty once called
        OnExited exited;                     ///< empty until a worker that was found is adopted
        std::optional<ProcessExit> early{};  ///< it ended before that
        std::optional<Error> unreceived{};   ///< why its descriptors never came: the spawn fails with it once it ended
    };

    void on_packet(Packet& packet);
    void on_hello(const keeper_link::KeeperHello& hello);
    void on_worker(const keeper_link::WorkerRecord& record, std::span<const std::byte> rest, Packet& packet);
    void on_hello_end();
    void on_spawned(const keeper_link::Spawned& body, Packet& packet);
    void on_spawn_failed(const keeper_link::SpawnFailed& body);
    void on_exited(const keeper_link::Exited& body);
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

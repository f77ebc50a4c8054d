#pragma once

#include <map>
#include <memory>
#include <optional>

#include "ipc/keeper_link.h"
#include "supervisor/deadline.h"
#include "supervisor/keeper.h"
#include "supervisor/packet_link.h"

namespace bulkhead::supervisor {

/// The link to the keeper (ipc/keeper_link.h), spoken from the supervisor's side.
class KeeperClient : public Keeper {
public:
    struct Handlers {
        /// The keeper has said who it is, and every worker of a former supervisor has ended.
        std::function<void(const keeper_link::KeeperHello&)> ready;
        std::function<void()> stop_asked;
        std::function<void()> reload_asked;
        /// The link has ended: without its keeper a supervisor has nothing to do.
        std::function<void(const Error* why)> closed;
    };

    KeeperClient(boost::asio::io_context& io, UniqueFd link);
    ~KeeperClient() override;
    void start(Handlers handlers);

    void spawn(SpawnRequest request, OnSpawned spawned, OnExited exited) override;
    void signal(const WorkerName& name, int number, bool whole_group) override;
    void forget(const WorkerName& name) override;

    /// Everything is unloaded: the keeper removes the socket and ends.
    void stop();
    [[nodiscard]] bool is_flushed() const noexcept { return link_->is_flushed(); }

    /// Pids of a former supervisor's workers, by place; complete once `ready` was called.
    [[nodiscard]] const std::map<std::string, pid_t>& ended_with_supervisor() const noexcept {
        return ended_with_supervisor_;
    }

private:
    struct Life {
        OnSpawned spawned;  ///< empty once called
        OnExited exited;
    };

    void on_packet(Packet& packet);
    void on_hello(const keeper_link::KeeperHello& hello);
    void on_worker(const keeper_link::WorkerRecord& record);
    void on_hello_end();
    void on_spawned(const keeper_link::Spawned& body, std::vector<UniqueFd> fds);
    void on_spawn_failed(const keeper_link::SpawnFailed& body);
    void on_exited(const keeper_link::Exited& body);
    void say_ready();
    void violated(const std::string& what);

    std::shared_ptr<PacketLink> link_;
    Handlers handlers_;
    std::optional<keeper_link::KeeperHello> hello_;
    bool ready_said_ = false;
    bool listed_ = false;
    std::map<std::string, pid_t> ended_with_supervisor_;
    std::size_t strangers_ = 0;  ///< workers of a former supervisor that are still to end
    Deadline strangers_deadline_;
    std::map<std::uint64_t, Life> lives_;  ///< by generation
    std::uint64_t last_request_ = 0;
};

}  // namespace bulkhead::supervisor

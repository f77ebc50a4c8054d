#pragma once

#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <boost/asio/io_context.hpp>

#include "supervisor/control/control_server.h"
#include "supervisor/control/methods.h"
#include "supervisor/gpu/gpu_quarantine.h"
#include "supervisor/keeper_link/keeper_client.h"

namespace bulkhead::supervisor {

/// The whole program: the keeper's link, the fleet and the control socket on one loop.
class Supervisor {
public:
    struct Options {
        std::string socket;  ///< path of the control socket, which the keeper has created
        std::string worker_program;
        std::filesystem::path python_start;  ///< of `bulkhead.worker`
        config::Fleet fleet;
        std::string fleet_error;  ///< why `fleet` differs from the file; empty: it does not
        std::filesystem::path cache;
        std::optional<LogStore> logs;
        std::map<std::string, std::string> inherited;  ///< environment for workers
        UniqueFd keeper_link;
        UniqueFd listener;
    };

    explicit Supervisor(Options options);
    /// Runs until the daemon is stopped (returns 0) or has lost its keeper (1).
    int run();

private:
    struct Reread {
        config::ReadFleet read;
        Declarations declarations;
    };

    void on_keeper_ready(const keeper_link::KeeperHello& hello);
    void read_former(const LogStore& logs, const keeper_link::KeeperHello& hello);
    void keep_gpu_quarantine(const GpuQuarantineFile& file, const std::shared_ptr<LogWriter>& writer,
                             std::optional<GpuQuarantine::State> known);
    void begin();
    void serve();
    void stop(std::function<void(std::vector<Receipt>)> stopped);
    void end();
    void finish(std::function<void()> tell_keeper);
    void end_when_flushed();
    void reload(std::function<void(const Reloaded&)> reloaded);
    void on_reread(Reread reread);
    void answer_reload(const Reloaded& reloaded);
    void stay(const Reloaded& reloaded);
    void upgrade(bool with_keeper, std::function<void(const Result<>&)> answer);
    void check_next(bool with_keeper, std::function<void(Result<>)> checked);
    void hand_over(bool with_keeper);
    void hand_over_when_spawned(bool with_keeper);

    Options options_;
    boost::asio::io_context io_{1};
    Gpus gpus_;
    EventBus events_;
    BlockingQueue checks_{io_};    ///< checks of the next program, which may take seconds
    BlockingQueue blocking_{io_};  ///< declared after what its jobs use, so that it is joined first
    KeeperClient keeper_;
    std::optional<FleetContext> context_;
    std::optional<Fleet> fleet_;
    std::optional<Daemon> daemon_;
    std::optional<ControlServer> server_;
    DaemonFacts facts_;
    std::vector<FoundWorker> found_;  ///< until they are adopted
    /// When this supervisor started.
    Declarations declarations_;
    Admission::Known known_;    ///< until the fleet has it
    FormerLines former_lines_;  ///< until its models exist
    Deadline end_check_{io_};
    Deadline::Clock::time_point end_by_{};
    /// Wait for the reload under way.
    std::vector<std::function<void(const Reloaded&)>> reload_waiters_;
    enum class Phase : std::uint8_t {
        starting,  ///< before it has a fleet
        serving,
        handing_over,  ///< a successor takes over once no process is being spawned
        ending,
    };
    enum class Order : std::uint8_t { none, reload, stop };
    Phase phase_ = Phase::starting;
    Order early_order_ = Order::none;  ///< of the keeper, while starting; the highest counts
    int status_ = 0;
};

}  // namespace bulkhead::supervisor

#pragma once

#include <filesystem>
#include <memory>
#include <optional>
#include <string>

#include <boost/asio/io_context.hpp>

#include "supervisor/control_server.h"
#include "supervisor/keeper_client.h"
#include "supervisor/methods.h"

namespace bulkhead::supervisor {

/// The whole program: keeper's link, fleet and control socket on one loop.
class Supervisor {
public:
    struct Options {
        std::string socket;  ///< path of the control socket, which the keeper has made
        std::string worker_program;
        config::Fleet fleet;
        std::filesystem::path cache;
        std::optional<std::filesystem::path> log_folder;
        std::vector<std::string> inherited;  ///< environment for workers
        UniqueFd keeper_link;
        UniqueFd listener;
    };

    explicit Supervisor(Options options);
    /// Until the daemon was stopped (0) or has lost its keeper (1).
    int run();

private:
    void on_keeper_ready(const keeper_link::KeeperHello& hello);
    void begin();
    void stop(std::function<void(std::vector<Receipt>)> stopped);
    void end();
    void end_when_flushed();

    Options options_;
    boost::asio::io_context io_{1};
    Gpus gpus_;
    EventBus events_;
    OffLoop off_loop_{io_};  ///< after what its jobs use, so that it is joined first
    KeeperClient keeper_;
    std::optional<FleetContext> context_;
    std::optional<Fleet> fleet_;
    std::optional<Daemon> daemon_;
    std::optional<ControlServer> server_;
    DaemonFacts facts_;
    Deadline end_check_{io_};
    Deadline::Clock::time_point end_by_{};
    bool stop_asked_ = false;
    bool ending_ = false;
    int status_ = 0;
};

}  // namespace bulkhead::supervisor

#pragma once

#include <memory>
#include <set>

#include <boost/asio/posix/stream_descriptor.hpp>

#include "supervisor/base/deadline.h"
#include "supervisor/control/rpc.h"

namespace bulkhead::supervisor {

class ControlConnection;

/// Accepts connections from the keeper's listening socket. Answers only this daemon's
/// user and root.
class ControlServer {
public:
    ControlServer(boost::asio::io_context& io, UniqueFd listener, rpc::MethodTable methods);
    ~ControlServer();
    void start() { wait_for_connection(); }

    /// Accepts no more connections. Calls `done` when all answers are sent, or after
    /// `control_flush_deadline`.
    void finish(std::function<void()> done);
    [[nodiscard]] std::size_t connections() const noexcept { return connections_.size(); }

private:
    void wait_for_connection();
    /// Returns false if no connection waits.
    bool accept_one();
    void admit(UniqueFd socket);

    boost::asio::io_context& io_;
    boost::asio::posix::stream_descriptor listener_;
    rpc::MethodTable methods_;
    std::set<std::shared_ptr<ControlConnection>> connections_;
    std::uint64_t last_connection_ = 0;
    UniqueFd reserve_;  ///< closed for a moment to accept a client, which is told that
                        ///< descriptors have run out
    Deadline pause_;
    Deadline flush_deadline_;
    bool exhausted_ = false;  ///< even closing the reserve did not help
};

}  // namespace bulkhead::supervisor

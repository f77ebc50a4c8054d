#pragma once

#include <memory>
#include <set>

#include <boost/asio/posix/stream_descriptor.hpp>

#include "supervisor/control/control_connection.h"

namespace bulkhead::supervisor {

/// Takes connections from the keeper's listening socket. Only this daemon's user, and root, get an answer.
class ControlServer {
public:
    ControlServer(boost::asio::io_context& io, UniqueFd listener, rpc::MethodTable methods);
    ~ControlServer();
    void start() { wait_for_connection(); }

    /// Takes no more, and calls `done` when all that was answered has left, or `control_flush_deadline` has passed.
    void finish(std::function<void()> done);
    [[nodiscard]] std::size_t connections() const noexcept { return connections_.size(); }

private:
    void wait_for_connection();
    /// False when there is none to take now.
    bool accept_one();
    void admit(UniqueFd socket);

    boost::asio::io_context& io_;
    boost::asio::posix::stream_descriptor listener_;
    rpc::MethodTable methods_;
    std::set<std::shared_ptr<ControlConnection>> connections_;
    UniqueFd reserve_;  ///< given up for a moment, so that a client can be told that descriptors have run out
    Deadline pause_;
    Deadline flush_deadline_;
    bool exhausted_ = false;  ///< not even the reserve helped
};

}  // namespace bulkhead::supervisor

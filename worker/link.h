#pragma once

#include <functional>
#include <memory>

#include <boost/asio/io_context.hpp>
#include <boost/json.hpp>

#include "ipc/unique_fd.h"
#include "worker/link_messages.h"
#include "worker/packet_stream.h"

namespace bulkhead::worker {

/// The worker's end of the link to the daemon.
///
/// Nobody may be reading at the other end: the keeper only holds it while a supervisor is away. Then the outbox
/// fills, and what comes on top is dropped. Nothing is lost by that: a new supervisor asks for the full state.
///
/// Thread  the event loop
class WorkerLink {
public:
    struct Events {
        std::function<void(LinkMessage)> message;
        std::function<void()> lost;  ///< the keeper is gone
    };
    WorkerLink(boost::asio::io_context& io, UniqueFd socket, std::span<std::byte> receive_buffer, Events events);
    ~WorkerLink() { stream_->close(); }
    WorkerLink(const WorkerLink&) = delete;
    WorkerLink& operator=(const WorkerLink&) = delete;

    void send(const boost::json::object& message);
    /// Blocks, bounded: before the process ends.
    void flush();

private:
    std::shared_ptr<PacketStream> stream_;
    bool dropping_ = false;  ///< said once per full outbox
};

}  // namespace bulkhead::worker

#pragma once

#include <functional>
#include <memory>
#include <string_view>
#include <vector>

#include <boost/asio/io_context.hpp>
#include <boost/json.hpp>

#include "ipc/base/unique_fd.h"
#include "ipc/links/worker_link.h"
#include "worker/link/link_messages.h"
#include "worker/loop/packet_stream.h"

namespace bulkhead::worker {

/// A hello and its descriptors, which stay their owners'.
struct HelloPacket {
    boost::json::object message;
    std::vector<int> fds;
};

/// The worker's end of the link to the daemon.
///
/// While a supervisor is away, nobody reads the other end: the keeper only holds it. So messages that the next hello
/// repeats (`busy`, `idle`, `progress`, `statistics`) are sent only while most of the socket is free. The rest is kept
/// for messages that must arrive, a signal handler's last one included. Those wait in the bounded outbox.
///
/// Thread  the event loop; blocks in `flush` only
class WorkerLink {
public:
    struct Events {
        std::function<void(LinkMessage)> message;
        std::function<void()> lost;  ///< the keeper is gone
        /// Returns the present state; called when the hello can be sent. Called again without descriptors where the
        /// kernel refuses them.
        std::function<HelloPacket(bool with_descriptors)> hello;
        std::function<void()> caught_up;  ///< somebody reads again, and messages were dropped before
    };
    WorkerLink(boost::asio::io_context& io, UniqueFd socket, std::span<std::byte> receive_buffer, Events events);
    ~WorkerLink() { stream_->close(); }
    WorkerLink(const WorkerLink&) = delete;
    WorkerLink& operator=(const WorkerLink&) = delete;

    [[nodiscard]] int descriptor() const noexcept { return stream_->descriptor(); }
    /// False when it was dropped.
    bool send(const boost::json::object& message);
    bool send(worker_link::ToDaemon message) { return send(worker_link::to_json(std::move(message))); }
    /// Now, or as soon as somebody reads, behind everything that waits. Owed twice, it is sent once.
    void say_hello();
    /// Blocks, bounded: before the process ends.
    void flush();

private:
    void say_owed_hello();
    void has_flushed();
    void count_dropped(std::string_view type);

    Events events_;
    std::shared_ptr<PacketStream> stream_;
    bool hello_owed_ = false;
    bool dropped_ = false;  ///< since somebody read; logged once
};

}  // namespace bulkhead::worker

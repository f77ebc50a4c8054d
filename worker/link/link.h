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

/// A hello, and its descriptors, which it does not own.
struct HelloPacket {
    boost::json::object message;
    std::vector<int> fds;
};

/// The worker's end of the link to the daemon.
///
/// Without a supervisor nothing reads the other end; the keeper only holds it. So messages that the
/// next hello repeats (`busy`, `idle`, `progress`, `statistics`) are sent only while most of the
/// socket buffer is free. The rest is reserved for messages that must arrive, such as a signal
/// handler's last one. Those wait in the bounded outbox.
///
/// Thread  the event loop; only `flush` blocks
class WorkerLink {
public:
    struct Events {
        std::function<void(LinkMessage)> message;
        std::function<void()> lost;  ///< the keeper is gone
        /// Returns the present state. Called when a hello can be sent, and again without
        /// descriptors if the kernel refuses them.
        std::function<HelloPacket(bool with_descriptors)> hello;
        std::function<void()> caught_up;  ///< the peer reads again, after messages were dropped
    };
    WorkerLink(boost::asio::io_context& io, UniqueFd socket, std::span<std::byte> receive_buffer, Events events);
    ~WorkerLink() { stream_->close(); }
    WorkerLink(const WorkerLink&) = delete;
    WorkerLink& operator=(const WorkerLink&) = delete;

    [[nodiscard]] int descriptor() const noexcept { return stream_->descriptor(); }
    /// False if the message was dropped.
    bool send(const boost::json::object& message);
    bool send(worker_link::ToDaemon message) { return send(worker_link::to_json(std::move(message))); }
    /// Sends a hello, after all waiting messages, once the peer reads. Repeated calls before that
    /// send only one.
    void say_hello();
    /// Blocks, with a bound, before the process ends.
    void flush();

private:
    void has_flushed();
    void count_dropped(std::string_view type);

    Events events_;
    std::shared_ptr<PacketStream> stream_;
    bool hello_owed_ = false;
    bool dropped_ = false;  ///< since the peer last read; logged once
};

}  // namespace bulkhead::worker

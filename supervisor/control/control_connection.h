#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <set>
#include <string>

#include <boost/asio/posix/stream_descriptor.hpp>

#include "supervisor/base/deadline.h"
#include "supervisor/control/rpc.h"

namespace bulkhead::supervisor {

/// One client of the control socket: lines in, lines and descriptors out.
///
/// Bound   the line, the requests in flight and the unsent answers, all in limits.h. A timer runs
///         only while a line is partly received.
/// Life    owned by the server until closed. A client that has shut down its writing side,
///         as `socat` does, is kept until it has its answers; one with a subscription until
///         it disconnects.
class ControlConnection : public NotificationSink, public std::enable_shared_from_this<ControlConnection> {
public:
    using OnClosed = std::function<void(const std::shared_ptr<ControlConnection>&)>;

    ControlConnection(boost::asio::io_context& io, UniqueFd socket, rpc::Peer peer, const rpc::MethodTable& methods,
                      OnClosed on_closed);
    void start() { wait_readable(); }
    void notify(const std::string& line) override;
    void subscribed() override { subscribed_ = true; }
    void close();
    [[nodiscard]] bool is_flushed() const noexcept { return outbox_.empty(); }
    [[nodiscard]] const rpc::Peer& peer() const noexcept { return peer_; }

private:
    struct Outgoing {
        std::string line;
        std::size_t sent = 0;
        std::vector<UniqueFd> fds;  ///< sent with the first byte
    };

    void wait_readable();
    void read_some();
    void take_lines();
    void take_line(std::string_view line);
    void dispatch(rpc::Request request);
    void answer(const json::value& id, Result<rpc::Answer> answer);
    void refuse_and_close(const Error& error);
    void on_end_of_file();
    void close_if_done();
    void enqueue(std::string line, std::vector<UniqueFd> fds = {});
    void flush();

    boost::asio::posix::stream_descriptor socket_;
    rpc::Peer peer_;
    const rpc::MethodTable& methods_;
    OnClosed on_closed_;
    std::string buffer_;  ///< received bytes that are not a whole line yet
    Deadline line_deadline_;
    std::deque<Outgoing> outbox_;
    std::size_t outbox_bytes_ = 0;
    bool waits_writable_ = false;
    std::size_t in_flight_ = 0;
    /// Callbacks of requests without an answer.
    std::set<std::shared_ptr<std::function<void()>>> when_left_;
    bool subscribed_ = false;
    enum class Input : std::uint8_t {
        open,
        ended,    ///< the client has shut down its writing side: close once it has its answers
        refused,  ///< nothing more is read: close once the outbox is empty
    };
    Input input_ = Input::open;
};

}  // namespace bulkhead::supervisor

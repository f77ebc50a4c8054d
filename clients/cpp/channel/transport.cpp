#include "clients/cpp/channel/transport.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <climits>

namespace bulkhead {
namespace {

Error in_child() {
    return {ErrorCode::worker_lost, "this channel belongs to the process that this one was forked from",
            "open a channel of its own in each process"};
}

}  // namespace

Transport::Transport(UniqueFd socket)
    : socket_{std::move(socket)}, socket_in_child_{socket_.get()}, packets_{socket_.get()}, buffer_(packet_bytes_max) {}

Result<Transport> Transport::make(UniqueFd socket) {
    const int flags = ::fcntl(socket.get(), F_GETFL);
    if (flags < 0 || ::fcntl(socket.get(), F_SETFL, flags | O_NONBLOCK) != 0)
        return system_error("opening a channel", errno);
    return Transport{std::move(socket)};
}

Result<> Transport::use_rings(const channel::RingOffer& offer, std::vector<UniqueFd> fds) {
    Result<std::unique_ptr<RingEnd>> rings = RingEnd::adopt(offer, std::move(fds));
    if (!rings) return std::move(rings).error();
    Result<UniqueFd> waitable = packets_.use(std::move(*rings));
    if (!waitable) return std::move(waitable).error();
    waitable_ = std::move(*waitable);
    waitable_in_child_ = ClosedInChild{waitable_.get()};
    rest();
    return {};
}

/// Runs one call in the process that opened the channel; lets the worker ring afterwards.
template <typename Call>
auto Transport::run(const Call& call) -> decltype(call()) {
    if (socket_in_child_.in_child()) return in_child();
    auto outcome = call();
    rest();
    return outcome;
}

Result<> Transport::send(std::span<const std::byte> packet, std::span<const int> fds) {
    return run([&] { return packets_.send(packet, fds); });
}

Result<> Transport::post(std::span<const std::byte> packet, PacketTransport::Wake wake) {
    return run([&] { return packets_.post(packet, wake); });
}

/// The worker may itself be waiting until its answers are read, so an incoming packet also
/// ends the wait.
Result<bool> Transport::wait_to_send(Clock::time_point until) {
    return run([&] {
        return packets_.has_rings() && packets_.socket_was_full() ? wait_at_both(until) : wait(until, true);
    });
}

Result<bool> Transport::wait_at_both(Clock::time_point until) {
    bool ready = !packets_.prepare_to_sleep(false);
    while (!ready && Clock::now() < until) {
        const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - Clock::now()).count();
        std::array<pollfd, 2> entries{{{socket_.get(), POLLOUT, 0}, {waitable_.get(), POLLIN, 0}}};
        const int count =
            ::poll(entries.data(), entries.size(), static_cast<int>(std::clamp<std::int64_t>(left, 0, INT_MAX)));
        if (count < 0 && errno != EINTR) return system_error("waiting for a channel", errno);
        ready = count > 0;
    }
    if (const Result<bool> looked = packets_.sleep(std::chrono::milliseconds{0}); !looked) return looked;
    packets_.stay_awake();
    return ready;
}

Result<ReceiveOutcome> Transport::receive(Packet& packet, Clock::time_point until) {
    return run([&] { return await_packet(packet, until); });
}

Result<ReceiveOutcome> Transport::await_packet(Packet& packet, Clock::time_point until) {
    for (;;) {
        // Without rings, the socket is read only once it is readable; checking a ring
        // costs nothing.
        if (packets_.has_rings()) {
            Result<ReceiveOutcome> outcome = packets_.receive(buffer_, packet);
            if (!outcome || *outcome != ReceiveOutcome::would_block) return outcome;
        }
        const Result<bool> ready = wait(until, false);
        if (!ready) return ready.error();
        if (!*ready) return ReceiveOutcome::would_block;
        if (!packets_.has_rings()) return packets_.receive(buffer_, packet);
    }
}

Result<ReceiveOutcome> Transport::receive_now(Packet& packet) {
    return run([&]() -> Result<ReceiveOutcome> {
        if (packets_.has_rings())
            if (const auto looked = packets_.sleep(std::chrono::milliseconds{0}); !looked) return looked.error();
        return packets_.receive(buffer_, packet);
    });
}

/// False at `until`.
Result<bool> Transport::wait(Clock::time_point until, bool to_send) {
    if (!packets_.has_rings()) {
        const Result<short> ready = wait_ready(socket_.get(), to_send ? POLLIN | POLLOUT : POLLIN, until);
        if (!ready) return ready.error();
        return *ready != 0;
    }
    bool ready = false;
    while (!ready) {
        ready = !packets_.prepare_to_sleep(to_send);
        if (ready) break;
        const Result<bool> woken = packets_.sleep(std::chrono::ceil<std::chrono::milliseconds>(until - Clock::now()));
        if (!woken) return woken;
        if (!*woken && Clock::now() >= until) break;
    }
    packets_.stay_awake();
    return ready || packets_.readable();
}

/// Runs at the end of each call if the caller polls: lets the worker ring, and signals packets that
/// have already arrived.
void Transport::rest() {
    if (polled_ && packets_.has_rings() && !packets_.prepare_to_sleep(false)) packets_.wake_self();
}

int Transport::fd() {
    // A forked child lacks the rings' memory, and its descriptor is readable anyway.
    if (!socket_in_child_.in_child() && !std::exchange(polled_, true)) rest();
    return waitable_ ? waitable_.get() : socket_.get();
}

void Transport::hang_up() {
    ::shutdown(socket_.get(), SHUT_RDWR);
    if (!socket_in_child_.in_child()) packets_.drop_rings();
}

}  // namespace bulkhead

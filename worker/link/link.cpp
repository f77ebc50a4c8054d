#include "worker/link/link.h"

#include <algorithm>

#include <spdlog/spdlog.h>

#include "worker/loop/limits.h"

namespace bulkhead::worker {

WorkerLink::WorkerLink(boost::asio::io_context& io, UniqueFd socket, std::span<std::byte> receive_buffer, Events events)
    : events_{std::move(events)}, stream_{PacketStream::make(
                                      io, std::move(socket), receive_buffer,
                                      {.packet =
                                           [this](Packet& packet) {
                                               Result<LinkMessage> parsed = parse_link_message(packet);
                                               if (parsed)
                                                   events_.message(std::move(*parsed));
                                               else
                                                   spdlog::warn("ignored: {}", parsed.error().text());
                                           },
                                       .refused = [](const Error& error) { spdlog::warn("ignored: {}", error.text()); },
                                       .lost = [this](std::string_view) { events_.lost(); },
                                       .flushed = [this] { has_flushed(); }})} {}

bool WorkerLink::send(const boost::json::object& message) {
    const std::string_view type = message.at("type").as_string();
    const auto is_among = [type](const auto& types) { return std::ranges::find(types, type) != types.end(); };
    if (is_among(worker_link::dropped_unread) && !stream_->has_room()) {
        count_dropped(type);
        return false;
    }
    const std::size_t reserve = is_among(worker_link::kept_unread) ? worker_link::kept_unread.size() : 0;
    const std::string text = boost::json::serialize(message);
    if (stream_->send(std::as_bytes(std::span{text}), {}, reserve) != PacketStream::Sent::outbox_full) return true;
    count_dropped(type);
    return false;
}

void WorkerLink::say_hello() {
    hello_owed_ = true;
    for (const bool with_descriptors : {true, false}) {
        const HelloPacket hello = events_.hello(with_descriptors);
        const std::string text = boost::json::serialize(hello.message);
        const auto sent = stream_->send_now(std::as_bytes(std::span{text}), hello.fds);
        if (sent == PacketStream::Sent::queued) return;  // built again when the peer reads
        if (sent != PacketStream::Sent::refused) break;
        spdlog::warn("the kernel refuses a hello with {} descriptors", hello.fds.size());
    }
    hello_owed_ = false;
    dropped_ = false;
}

void WorkerLink::has_flushed() {
    if (hello_owed_) return say_hello();
    if (std::exchange(dropped_, false)) events_.caught_up();
}

void WorkerLink::count_dropped(std::string_view type) {
    if (std::exchange(dropped_, true)) return;
    spdlog::info(
        "the daemon does not read the worker link: from \"{}\" on, messages that the next hello repeats are dropped",
        type);
}

void WorkerLink::flush() { stream_->flush_blocking(limits::link_flush); }

}  // namespace bulkhead::worker

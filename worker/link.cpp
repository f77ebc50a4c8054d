#include "worker/link.h"

#include <spdlog/spdlog.h>

#include "worker/limits.h"

namespace bulkhead::worker {

WorkerLink::WorkerLink(boost::asio::io_context& io, UniqueFd socket, std::span<std::byte> receive_buffer, Events events)
    : stream_{PacketStream::make(io, std::move(socket), receive_buffer,
                                 {.packet =
                                      [message = std::move(events.message)](Packet& packet) {
                                          Result<LinkMessage> parsed = parse_link_message(packet);
                                          if (parsed)
                                              message(std::move(*parsed));
                                          else
                                              spdlog::warn("ignored: {}", parsed.error().text());
                                      },
                                  .refused = [](const Error& error) { spdlog::warn("ignored: {}", error.text()); },
                                  .lost = [lost = std::move(events.lost)](std::string_view) { lost(); },
                                  .flushed = [this] { dropping_ = false; }})} {}

void WorkerLink::send(const boost::json::object& message) {
    const std::string text = boost::json::serialize(message);
    const auto sent = stream_->send(std::as_bytes(std::span{text}));
    if (sent != PacketStream::Sent::outbox_full || dropping_) return;
    dropping_ = true;
    spdlog::warn("nobody reads the worker link: packets are dropped until a supervisor asks for the full state");
}

void WorkerLink::flush() { stream_->flush_blocking(limits::link_flush); }

}  // namespace bulkhead::worker

/// Packets of a client, and of a lying worker. Each is parsed; what passes comes back unchanged
/// from its encoding. Then all of them reach a real session of a worker's event loop over a socket,
/// hello and slabs included: whatever they are, the worker ends no more than that channel.

#include <poll.h>
#include <sys/socket.h>

#include <thread>

#include <boost/asio/io_context.hpp>
#include <spdlog/spdlog.h>

#include "config/fleet_json.h"
#include "ipc/channel/channel_codec.h"
#include "tests/fuzz/fuzz_input.h"
#include "worker/server/server.h"

namespace {

using namespace bulkhead;
using fuzz::Input;

constexpr std::size_t packets_max = 32;

class Echo final : public worker::Model {
public:
    Echo() {
        config::MethodSpec method;
        method.inputs = {{"x", wire::DType::float32, {{0, 1 << 20}}}};
        method.parameters = {{"n", config::ParameterType::integer, config::ParameterValue{std::int64_t{1}}}};
        method.outputs = {{"y", wire::DType::float32, {{0, 1 << 20}}}};
        methods_.push_back(method);
    }
    const std::vector<config::MethodSpec>& methods() const noexcept override { return methods_; }
    Result<> run(const config::MethodSpec&, std::span<const worker::TensorView> inputs,
                 const std::vector<config::ParameterValue>&, worker::OutputSink& sink) override {
        auto room = sink.allocate("y", inputs[0].dtype, inputs[0].dims);
        if (!room) return room.error();
        BULKHEAD_PROMISE(room->size() == inputs[0].bytes.size());
        std::memcpy(room->data(), inputs[0].bytes.data(), room->size());
        return {};
    }
    Result<> reset() override { return {}; }
    void register_host_memory(std::span<std::byte>) override {}
    void unregister_host_memory(std::span<std::byte>) noexcept override {}
    boost::json::object graphs() const override { return {{"mode", "off"}}; }
    std::string device_name() const override { return "cpu"; }

private:
    std::vector<config::MethodSpec> methods_;
};

/// One worker for all runs, on a thread of its own: what one channel did to it, the
/// next would meet.
class Worker {
public:
    Worker() {
        spdlog::set_level(spdlog::level::off);
        auto [ours, theirs] = PacketPair::make().value();
        link_ = std::move(ours);
        server_.emplace(
            io_, std::move(theirs),
            worker::ServerOptions{.identity = {"token", "echo", 0, 1},
                                  .cache = {},
                                  .load = [](const auto&, const auto&) -> Result<std::unique_ptr<worker::Model>> {
                                      return std::unique_ptr<worker::Model>{std::make_unique<Echo>()};
                                  },
                                  .torch_version = "0",
                                  .exit = [](int) { std::abort(); }});
        thread_ = std::thread{[this] { server_->run(); }};
        config::ModelSpec spec;
        spec.name = "echo";
        spec.file = "/nonexistent";
        spec.log_level = config::LogLevel::error;
        spec.channel = {.input_bytes = 4096, .output_bytes = 4096, .bytes_max = 64 << 10, .channels_max = 8};
        say({{"type", "configure"}, {"protocol", 1}, {"device", "cpu"}, {"model", config::to_json(spec)}});
        hear_until("ready");
    }
    ~Worker() {
        io_.stop();
        thread_.join();
    }

    void serve(const std::vector<std::span<const std::byte>>& packets) {
        auto [client, session] = PacketPair::make().value();
        const int fd = session.get();
        say({{"type", "channel"}, {"channel", ++channel_}, {"client_pid", 1}, {"client_uid", 0}}, fd);
        session.reset();
        for (const auto packet : packets) {
            while (read_one(client.get(), 0)) {
            }
            if (!send_packet(client.get(), packet)) break;  // it has closed the channel
        }
        ::shutdown(client.get(), SHUT_WR);
        while (read_one(client.get(), -1)) {
        }
        drain_link();
    }

private:
    void say(const boost::json::object& message, int fd = -1) {
        const auto sent = send_packet(link_.get(), boost::json::serialize(message), {&fd, fd >= 0 ? 1U : 0U});
        BULKHEAD_PROMISE(sent.has_value());
    }
    /// False at the end of file, or when nothing came in time.
    bool read_one(int socket, int time_ms) {
        pollfd entry{socket, POLLIN, 0};
        if (::poll(&entry, 1, time_ms) <= 0) return false;
        Packet packet;
        const auto outcome = receive_packet(socket, buffer_, packet);
        if (!outcome || *outcome != ReceiveOutcome::packet) return false;
        BULKHEAD_PROMISE(channel::parse_from_worker(packet.bytes).has_value());
        return true;
    }
    void hear_until(std::string_view type) {
        for (;;) {
            Packet packet;
            const auto outcome = receive_packet(link_.get(), buffer_, packet);
            BULKHEAD_PROMISE(outcome && *outcome == ReceiveOutcome::packet);
            if (boost::json::parse(fuzz::as_text(packet.bytes)).at("type").as_string() == type) return;
        }
    }
    void drain_link() {
        Packet packet;
        for (;;) {
            const auto outcome = receive_packet(link_.get(), buffer_, packet, MSG_DONTWAIT);
            BULKHEAD_PROMISE(outcome && *outcome != ReceiveOutcome::closed);
            if (*outcome == ReceiveOutcome::would_block) return;
        }
    }

    boost::asio::io_context io_;
    std::optional<worker::Server> server_;
    UniqueFd link_;
    std::thread thread_;
    std::uint64_t channel_ = 0;
    std::vector<std::byte> buffer_ = std::vector<std::byte>(packet_bytes_max);
};

template <typename T>
std::vector<std::byte> encoded(const T& message) {
    if constexpr (requires { channel::encode(message).has_value(); })
        return channel::encode(message).value();
    else
        return channel::encode(message);
}

/// Encoding and parsing again gives the same bytes: nothing that passed is lost or invented.
void check_both_ways(std::span<const std::byte> packet) {
    if (const auto message = channel::parse_from_client(packet)) {
        const auto once = std::visit([](const auto& m) { return encoded(m); }, *message);
        const auto again = channel::parse_from_client(once);
        BULKHEAD_PROMISE(again.has_value());
        BULKHEAD_PROMISE(once == std::visit([](const auto& m) { return encoded(m); }, *again));
    }
    if (const auto message = channel::parse_from_worker(packet)) {
        const auto once = std::visit([](const auto& m) { return encoded(m); }, *message);
        const auto again = channel::parse_from_worker(once);
        BULKHEAD_PROMISE(again.has_value());
        BULKHEAD_PROMISE(once == std::visit([](const auto& m) { return encoded(m); }, *again));
    }
}

}  // namespace

/// Pieces: each a packet. An odd first byte keeps the run to the parsers, which are faster by far.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    Input input{data, size};
    const bool parse_only = (input.take<std::uint8_t>() & 1) != 0;
    std::vector<std::span<const std::byte>> packets;
    while (!input.empty() && packets.size() < packets_max) packets.push_back(input.take_piece());
    for (const auto packet : packets) check_both_ways(packet);
    if (parse_only) return 0;
    static Worker worker;
    worker.serve(packets);
    return 0;
}

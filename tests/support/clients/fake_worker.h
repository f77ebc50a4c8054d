#pragma once

#include <poll.h>

#include <condition_variable>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "ipc/base/packet.h"
#include "ipc/channel/channel_codec.h"
#include "ipc/slab/host_slab.h"
#include "ipc/slab/slab_allocator.h"
#include "tests/support/transport_end.h"

namespace bulkhead::test {

/// The worker's end of a channel, spoken by hand: a script on a thread of its own says what it
/// does, right or wrong. A failed expectation in the script fails the test.
class FakeWorker {
public:
    using Script = std::function<void(FakeWorker&)>;

    explicit FakeWorker(Script script) : FakeWorker{std::move(script), PacketPair::make().value()} {}
    FakeWorker(Script script, PacketPair pair) : end_{std::move(pair.first)}, client_end_{std::move(pair.second)} {
        thread_ = std::thread{[this, run = std::move(script)] {
            run(*this);
            hang_up();
        }};
    }
    ~FakeWorker() { finish(); }
    void finish() {
        if (thread_.joinable()) thread_.join();
    }

    UniqueFd client_end() { return std::move(client_end_); }

    // For the script

    static constexpr std::uint64_t slab_bytes = 64 * 1024;
    channel::Welcome welcome{.slab_count = 2,
                             .in_flight_max = 4,
                             .generation = 3,
                             .channel = 1,
                             .slab_bytes_max = 1 << 20,
                             .model = "fake",
                             .methods = {{"forward", boost::json::object{}}}};
    std::vector<HostSlab> slabs;  ///< input at 0, output at 1 after `greet`
    SlabAllocator outputs{slab_bytes};
    std::vector<UniqueFd> brought;  ///< with the last message

    void send(const std::vector<std::byte>& packet, std::span<const int> fds = {}) { end_.send(packet, fds); }
    void offer(std::uint32_t id, wire::SlabDirection direction, std::uint64_t size = slab_bytes,
               std::uint64_t request_id = 0) {
        slabs.push_back(HostSlab::create(size, direction, "fake").value());
        const std::array<int, 1> fds{slabs.back().fd()};
        send(channel::encode(channel::SlabOffer{request_id, id, direction, wire::SlabKind::host_memfd, size}), fds);
    }
    /// Hello, welcome, rings where the tests run over them, one slab each way: ids 0 and 1.
    void greet() {
        const auto hello = expect<channel::Hello>();
        if (over_rings()) welcome.features |= hello.features & wire::feature_rings;
        send(channel::encode(welcome).value());
        if (over_rings()) end_.offer_rings(ring::cells_usual);
        offer(0, wire::SlabDirection::input);
        offer(1, wire::SlabDirection::output);
    }
    /// Nothing once the client has hung up.
    std::optional<channel::ClientMessage> receive() {
        if (packed_.empty()) {
            Packet packet;
            if (end_.receive(packet) != ReceiveOutcome::packet) return std::nullopt;
            packed_.assign(packet.bytes.begin(), packet.bytes.end());
            brought = std::move(packet.fds);
        }
        const std::span<const std::byte> first = channel::first_message(packed_);
        auto message = channel::parse_from_client(first);
        EXPECT_TRUE(message) << message.error().error.text();
        packed_.erase(packed_.begin(), packed_.begin() + static_cast<std::ptrdiff_t>(first.size()));
        return std::move(*message);
    }
    /// Of the packet that came last, some messages are left.
    [[nodiscard]] bool has_packed() const { return !packed_.empty(); }
    template <typename T>
    T expect() {
        std::optional<channel::ClientMessage> message = receive();
        if (message && std::holds_alternative<T>(*message)) return std::get<T>(std::move(*message));
        ADD_FAILURE() << (message ? "another message came" : "the client hung up");
        return {};
    }
    /// An output that holds `values`, in slab 1.
    channel::Tensor output(std::string_view name, const std::vector<float>& values) {
        const std::uint64_t bytes = values.size() * sizeof(float);
        const SlabAllocator::Block block = outputs.allocate(bytes).value();
        std::memcpy(slabs.at(1).bytes().data() + block.offset_bytes, values.data(), bytes);
        return {std::string{name},
                wire::DType::float32,
                {static_cast<std::int64_t>(values.size())},
                {1, 0, block.offset_bytes, bytes, block.lease_id}};
    }
    void answer(std::uint64_t request_id, channel::Tensors tensors) {
        send(channel::encode(channel::InferResult{.request_id = request_id, .tensors = std::move(tensors)}).value());
    }
    std::vector<float> values_of(const channel::Tensor& tensor) {
        std::vector<float> values(tensor.lease.size_bytes / sizeof(float));
        std::memcpy(values.data(), slabs.at(tensor.lease.slab_id).bytes().data() + tensor.lease.offset_bytes,
                    tensor.lease.size_bytes);
        return values;
    }
    void hang_up() { end_.hang_up(); }
    /// Waits until the client has closed its end, or broken the channel off.
    void await_hang_up() {
        pollfd entry{end_.socket(), POLLRDHUP, 0};
        EXPECT_EQ(::poll(&entry, 1, 10'000), 1) << "the client has not hung up";
    }

private:
    TransportEnd end_;
    UniqueFd client_end_;
    std::vector<std::byte> packed_;
    std::thread thread_;
};

/// A gate that the test opens and the script waits at.
class Gate {
public:
    void open() {
        const std::lock_guard lock{mutex_};
        open_ = true;
        changed_.notify_all();
    }
    void wait() {
        std::unique_lock lock{mutex_};
        EXPECT_TRUE(changed_.wait_for(lock, std::chrono::seconds{10}, [this] { return open_; }));
    }

private:
    std::mutex mutex_;
    std::condition_variable changed_;
    bool open_ = false;
};

}  // namespace bulkhead::test

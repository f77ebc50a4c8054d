// A client may die between any two of its steps: what it had is given up, and nobody else notices.

#include <filesystem>
#include <fstream>

#include "tests/unit/worker/loop_harness.h"

namespace bulkhead::worker::test {
namespace {

class ChannelDeath : public LoopTest {
protected:
    struct Step {
        const char* name;
        std::function<void(TestClient&)> take;
    };

    /// A whole life, in the order in which clients live it.
    std::vector<Step> life() {
        const auto ask_for_slab = [](std::uint64_t id, wire::SlabDirection direction, std::uint64_t bytes) {
            return [=](TestClient& client) {
                client.send(channel::encode(channel::SlabRequest{id, direction, wire::SlabKind::host_memfd, bytes}));
            };
        };
        const auto read_one = [](TestClient& client) { ASSERT_TRUE(client.receive()); };
        return {
            {"hello",
             [](TestClient& client) {
                 client.send(channel::encode(channel::Hello{0, "mortal"}));
             }},
            {"welcome", read_one},
            {"its input slab", read_one},
            {"its output slab", read_one},
            {"a request that runs",
             [this](TestClient& client) {
                 client.infer(1, "wait", {client.tensor({1, 2})});
                 log->gate.await_arrivals(++arrivals_);
             }},
            {"a request that waits", [](TestClient& client) { client.infer(2, "echo", {client.tensor({3}, 64, 2)}); }},
            {"a cancel of it", [](TestClient& client) { client.send(channel::encode(channel::Cancel{2})); }},
            {"the answer to the cancel", [](TestClient& client) { client.expect_error(2, ErrorCode::cancelled); }},
            {"the end of the first one", [this](TestClient&) { log->gate.let_one_pass(); }},
            {"its result, which is a lease",
             [this](TestClient& client) { held_ = client.expect_result(1).tensors.at(0).lease; }},
            {"a request for a slab", ask_for_slab(3, wire::SlabDirection::input, 4096)},
            {"that slab", read_one},
            {"a request for one that the executor makes", ask_for_slab(4, wire::SlabDirection::input, 20u << 20)},
            {"that one", read_one},
            {"a result in a slab of its own",
             [](TestClient& client) {
                 client.infer(5, "fill", {}, {{"bytes", 1 << 20}});
             }},
            {"the slab and the result", [](TestClient& client) { client.expect_result(5); }},
            {"the lease given back",
             [this](TestClient& client) { client.send(channel::encode(channel::Release{{held_}})); }},
            {"a wrong one", [this](TestClient& client) { client.send(channel::encode(channel::Release{{held_}})); }},
            {"which is told", [](TestClient& client) { client.expect_error(0, ErrorCode::protocol_violation); }},
        };
    }

    static std::size_t slabs_mapped() {
        std::ifstream maps{"/proc/self/maps"};
        std::size_t count = 0;
        for (std::string line; std::getline(maps, line);) count += line.find("/memfd:bulkhead:") != std::string::npos;
        return count;
    }
    static auto descriptors() {
        return std::distance(std::filesystem::directory_iterator{"/proc/self/fd"},
                             std::filesystem::directory_iterator{});
    }

    int arrivals_ = 0;
    wire::LeaseRef held_{};
};

TEST_F(ChannelDeath, BetweenAnyTwoStepsLeavesNothingAndHurtsNobody) {
    spec.channel.bytes_max = 64u << 20;
    start_ready();
    TestClient neighbour = open_channel();
    const std::size_t slabs_before = slabs_mapped();
    const auto descriptors_before = descriptors();
    const std::vector<Step> steps = life();

    for (std::size_t taken = 0; taken <= steps.size(); ++taken) {
        SCOPED_TRACE(taken == 0 ? "before its first step" : steps[taken - 1].name);
        {
            TestClient client = introduce();
            for (std::size_t i = 0; i < taken; ++i) steps[i].take(client);

            client.close();

            const bool runs = taken >= 5 && taken < 9;  // the worker ends what it has begun
            if (runs) log->gate.let_one_pass();
            EXPECT_EQ(number(expect_said("channel_closed"), "channel"), client.id);
        }
        neighbour.infer(taken + 1, "echo", {neighbour.tensor({7})});
        EXPECT_EQ(neighbour.values(neighbour.expect_result(taken + 1).tensors.at(0)), (std::vector<float>{7}));
        neighbour.infer(1000 + taken, "echo", {neighbour.tensor({8})});
        neighbour.expect_result(1000 + taken);
        EXPECT_EQ(slabs_mapped(), slabs_before);
        EXPECT_EQ(descriptors(), descriptors_before);
        if (HasFatalFailure()) return;
    }
}

}  // namespace
}  // namespace bulkhead::worker::test

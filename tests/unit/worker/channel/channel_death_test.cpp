// A client may die between any two of its steps: what it had is given up, and nobody else notices.

#include "tests/support/worker/death_harness.h"

namespace bulkhead::worker::test {
namespace {

class ChannelDeath : public DeathTest {
protected:
    static Step ask_for_slab(const char* name, std::uint64_t id, std::uint64_t bytes) {
        return {name, [=](TestClient& client) {
                    client.send(channel::encode(channel::SlabRequest{id, wire::SlabDirection::input,
                                                                     wire::SlabKind::host_memfd, bytes}));
                }};
    }

    /// A whole life, in the order in which clients live it.
    std::vector<Step> life() {
        std::vector<Step> steps = opening(both);
        const std::vector<Step> after{
            {"a request that runs",
             [this](TestClient& client) {
                 client.infer(1, "wait", {client.tensor({1, 2})});
                 log->gate.await_arrivals(++arrivals_);
             },
             true},
            {"a request that waits", [](TestClient& client) { client.infer(2, "echo", {client.tensor({3}, 64, 2)}); },
             true},
            {"a cancel of it", [](TestClient& client) { client.send(channel::encode(channel::Cancel{2})); }, true},
            {"the answer to the cancel", [](TestClient& client) { client.expect_error(2, ErrorCode::cancelled); },
             true},
            {"the end of the first one", [this](TestClient&) { log->gate.let_one_pass(); }},
            {"its result, which is a lease",
             [this](TestClient& client) { held_ = client.expect_result(1).tensors.at(0).lease; }},
            ask_for_slab("a request for a slab", 3, 4096),
            receive_one("that slab"),
            ask_for_slab("a request for one that the executor makes", 4, 20u << 20),
            receive_one("that one"),
            {"a result in a slab of its own",
             [](TestClient& client) {
                 client.infer(5, "fill", {}, {{"bytes", 1 << 20}});
             }},
            {"the slab and the result", [](TestClient& client) { client.expect_result(5); }},
            {"the lease given back",
             [this](TestClient& client) { client.send(channel::encode(channel::Release{{held_}})); }},
            {"a wrong one", [this](TestClient& client) { client.send(channel::encode(channel::Release{{held_}})); }},
            {"which is told", [](TestClient& client) { client.expect_error(0, ErrorCode::protocol_violation); }},
            {"a loan",
             [this](TestClient& client) {
                 client.send(channel::encode(channel::SlabLend{6, loan, wire::SlabKind::host_memfd,
                                                               ForeignSlab::size_bytes}),
                             foreign_.memfd.get());
             }},
            receive_one("which is accepted"),
            {"a request that runs on it",
             [this](TestClient& client) {
                 client.infer(7, "wait", {ForeignSlab::tensor(loan, 32, 3)});
                 log->gate.await_arrivals(++arrivals_);
             },
             true},
            {"the loan's return, meanwhile", [this](TestClient& client) { return_slab(client, loan); }, true},
            {"the end of that request", [this](TestClient&) { log->gate.let_one_pass(); }},
            {"its result", [](TestClient& client) { client.expect_result(7); }},
            {"the return of an input slab",
             [this](TestClient& client) {
                 return_slab(client, client.find_slab(wire::SlabDirection::input)->offer.slab_id);
             }},
        };
        steps.insert(steps.end(), after.begin(), after.end());
        return steps;
    }

private:
    static constexpr std::uint32_t loan = wire::lent_slab_id_min;
    const ForeignSlab foreign_;
    int arrivals_ = 0;
    wire::LeaseRef held_{};
};

TEST_F(ChannelDeath, BetweenAnyTwoStepsLeavesNothingAndHurtsNobody) {
    spec.channel.bytes_max = 64u << 20;
    start_ready();
    die_after_each(life());
}

}  // namespace
}  // namespace bulkhead::worker::test

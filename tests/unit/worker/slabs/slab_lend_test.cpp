// Another worker's output read where it lies: docs/channel.md, "Lending".

#include <poll.h>
#include <unistd.h>

#include "tests/support/worker/slab_harness.h"

namespace bulkhead::worker::test {
namespace {

constexpr std::uint32_t first_id = wire::lent_slab_id_min;

class SlabLend : public SlabTest {
protected:
    void lend(TestClient& client, std::uint64_t request_id, std::uint32_t id, int fd,
              std::uint64_t size = ForeignSlab::size_bytes) {
        client.send(channel::encode(channel::SlabLend{request_id, id, wire::SlabKind::host_memfd, size}), fd);
    }
    void expect_accepted(TestClient& client, std::uint64_t request_id, std::uint32_t id) {
        const auto message = client.receive_answer();
        ASSERT_TRUE(message && std::holds_alternative<channel::SlabAccepted>(*message));
        const auto& accepted = std::get<channel::SlabAccepted>(*message);
        EXPECT_EQ(std::pair(accepted.request_id, accepted.slab_id), std::pair(request_id, id));
    }
};

TEST_F(SlabLend, RequestsInFlightMayReadTheSameBytes) {
    TestClient client = first_channel(both);
    const ForeignSlab slab;
    lend(client, 1, first_id, slab.memfd.get());
    expect_accepted(client, 1, first_id);

    client.infer(2, "wait", {ForeignSlab::tensor(first_id, 0, 64)});
    client.infer(3, "wait", {ForeignSlab::tensor(first_id, 16, 64)});
    await_statistics("in_flight", 2);
    log->gate.open();

    EXPECT_EQ(client.values(client.expect_result(2).tensors.at(0)).at(0), 0);
    EXPECT_EQ(client.values(client.expect_result(3).tensors.at(0)).at(0), 16);
    client.infer(4, "echo", {ForeignSlab::tensor(first_id, ForeignSlab::size_bytes / sizeof(float) - 16, 32)});
    client.expect_error(4, ErrorCode::protocol_violation);  // beyond the loan
}

TEST_F(SlabLend, AnIdBelowTheBoundOrUsedBeforeIsRefused) {
    TestClient client = first_channel(both);
    const ForeignSlab slab;

    lend(client, 1, first_id - 1, slab.memfd.get());
    client.expect_error(1, ErrorCode::input_invalid);
    lend(client, 3, first_id + 1, slab.memfd.get());
    expect_accepted(client, 3, first_id + 1);
    lend(client, 4, first_id + 1, slab.memfd.get());
    client.expect_error(4, ErrorCode::protocol_violation);
    lend(client, 5, first_id, slab.memfd.get());
    client.expect_error(5, ErrorCode::protocol_violation);
    return_slab(client, first_id + 1);
    lend(client, 6, first_id + 1, slab.memfd.get());
    client.expect_error(6, ErrorCode::protocol_violation);

    lend(client, 7, 0xFFFF'FFFF, slab.memfd.get());
    expect_accepted(client, 7, 0xFFFF'FFFF);
    client.echo(8);
}

TEST_F(SlabLend, ALoanOfAnotherKindIsClosedAtOnce) {
    TestClient client = first_channel(both);
    int ends[2];
    ASSERT_EQ(::pipe2(ends, O_CLOEXEC), 0);
    const UniqueFd reader{ends[0]};
    UniqueFd writer{ends[1]};

    client.send(channel::encode(channel::SlabLend{1, first_id, wire::SlabKind::cuda_vmm, ForeignSlab::size_bytes}),
                writer.get());
    writer.reset();

    client.expect_error(1, ErrorCode::input_invalid);
    pollfd hung_up{reader.get(), POLLIN, 0};
    EXPECT_EQ(::poll(&hung_up, 1, 30'000), 1) << "the worker keeps the descriptor";
}

TEST_F(SlabLend, LoansCountToTheNumberOfSlabs) {
    TestClient client = first_channel(both);
    const ForeignSlab slab;
    for (std::uint32_t i = 0; i < limits::channel_slabs_max - 2; ++i) {
        lend(client, i + 1, first_id + i, slab.memfd.get());
        expect_accepted(client, i + 1, first_id + i);
    }

    lend(client, 100, first_id + 100, slab.memfd.get());
    client.expect_error(100, ErrorCode::resources_exhausted);
    return_slab(client, first_id);
    await_mapped("/memfd:foreign", limits::channel_slabs_max - 3);

    lend(client, 101, first_id + 101, slab.memfd.get());
    expect_accepted(client, 101, first_id + 101);
}

TEST_F(SlabLend, AModelThatWritesIntoItsInputsIsLentNothing) {
    log->writes_inputs = true;
    TestClient client = first_channel(both);

    EXPECT_EQ(client.welcome.features & both, wire::feature_returning);
}

}  // namespace
}  // namespace bulkhead::worker::test

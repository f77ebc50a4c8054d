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
        EXPECT_EQ(std::get<channel::SlabAccepted>(*message), (channel::SlabAccepted{request_id, id}));
    }
    /// A channel to which `slab` is lent as `first_id`, by request 1.
    TestClient open_with_loan(const ForeignSlab& slab) {
        TestClient client = open_channel(both);
        lend(client, 1, first_id, slab.memfd.get());
        expect_accepted(client, 1, first_id);
        return client;
    }
    void expect_served(TestClient& client, std::uint64_t request_id) {
        client.infer(request_id, "echo", {client.tensor({1})});
        client.expect_result(request_id);
    }
};

TEST_F(SlabLend, RequestsInFlightMayReadTheSameBytes) {
    start_ready();
    const ForeignSlab slab;
    TestClient client = open_with_loan(slab);

    client.infer(2, "wait", {ForeignSlab::tensor(first_id, 0, 64)});
    client.infer(3, "wait", {ForeignSlab::tensor(first_id, 16, 64)});
    log->gate.open();

    EXPECT_EQ(client.values(client.expect_result(2).tensors.at(0)).at(0), 0);
    EXPECT_EQ(client.values(client.expect_result(3).tensors.at(0)).at(0), 16);
}

TEST_F(SlabLend, AnIdBelowTheBoundOrUsedBeforeIsRefused) {
    TestClient client = first_channel(both);
    const ForeignSlab slab;

    lend(client, 1, first_id - 1, slab.memfd.get());
    client.expect_error(1, ErrorCode::input_invalid);
    lend(client, 2, 1, slab.memfd.get());  // one of the worker's own
    client.expect_error(2, ErrorCode::input_invalid);
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
    expect_served(client, 8);
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

TEST_F(SlabLend, ALeaseBeyondALoanIsRefused) {
    start_ready();
    const ForeignSlab slab;
    TestClient client = open_with_loan(slab);
    channel::Tensor beyond = ForeignSlab::tensor(first_id, ForeignSlab::size_bytes / sizeof(float) - 16, 32);
    channel::Tensor crooked = ForeignSlab::tensor(first_id, 1, 4);
    channel::Tensor unknown = ForeignSlab::tensor(first_id + 1, 0, 4);

    std::uint64_t id = 1;
    for (const channel::Tensor& tensor : {beyond, crooked, unknown}) {
        client.infer(++id, "echo", {tensor});
        client.expect_error(id, ErrorCode::protocol_violation);
    }

    release(client, ForeignSlab::tensor(first_id, 0, 4).lease);  // nothing of this worker's
    client.expect_error(0, ErrorCode::protocol_violation);
    expect_served(client, 10);
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

TEST_F(SlabLend, AReturnedLoanIsUnmappedWhenTheRequestThatReadsItHasEnded) {
    start_ready();
    const ForeignSlab slab;
    TestClient client = open_with_loan(slab);
    client.infer(2, "wait", {ForeignSlab::tensor(first_id, 16, 2)});
    log->gate.await_arrivals(1);

    return_slab(client, first_id);
    client.infer(3, "echo", {ForeignSlab::tensor(first_id, 16, 2)});
    client.expect_error(3, ErrorCode::protocol_violation);
    return_slab(client, first_id);
    client.expect_error(0, ErrorCode::protocol_violation);
    log->gate.open();

    EXPECT_EQ(client.values(client.expect_result(2).tensors.at(0)), (std::vector<float>{16, 17}));
    await_mapped("/memfd:foreign", 0);
}

TEST_F(SlabLend, TheEndOfAChannelEndsItsLoansOnceNothingReadsThem) {
    TestClient client = first_channel(both);
    {
        const ForeignSlab slab;
        lend(client, 1, first_id, slab.memfd.get());
    }
    expect_accepted(client, 1, first_id);
    client.infer(2, "wait", {ForeignSlab::tensor(first_id, 16, 2)});
    log->gate.await_arrivals(1);

    client.close();
    await_statistics("channels", 1);  // still
    log->gate.open();

    await_statistics("channels", 0);
    await_mapped("/memfd:foreign", 0);
    EXPECT_EQ(log->runs_so_far().at(0), "wait 16");
}

TEST_F(SlabLend, ALargeSlabIsMappedWhileAnInferenceOfAnotherChannelRuns) {
    TestClient busy = first_channel();
    TestClient client = open_channel(both);
    const HostSlab large =
        HostSlab::create(limits::loop_slab_bytes_max + 4096, wire::SlabDirection::output, "large").value();
    busy.infer(1, "wait", {busy.tensor({1})});
    log->gate.await_arrivals(1);

    lend(client, 1, first_id, large.fd(), large.size_bytes());
    log->gate.open();

    expect_accepted(client, 1, first_id);
    busy.expect_result(1);
}

TEST_F(SlabLend, AModelThatWritesIntoItsInputsIsLentNothing) {
    class Scribbler final : public FakeModel {
    public:
        using FakeModel::FakeModel;
        [[nodiscard]] bool writes_inputs() const noexcept override { return true; }
    };
    load = [this](const config::ModelSpec&, const LoadContext&) -> Result<std::unique_ptr<Model>> {
        return std::unique_ptr<Model>{std::make_unique<Scribbler>(log)};
    };
    TestClient client = first_channel(both);

    EXPECT_EQ(client.welcome.features & both, wire::feature_returning);
}

}  // namespace
}  // namespace bulkhead::worker::test

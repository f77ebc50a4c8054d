// Outputs of one worker as inputs of another, and slabs that are given back: docs/channel.md, "Lending" and
// "Returning".

#include <gtest/gtest.h>

#include <future>

#include "tests/unit/clients/channel_calls.h"

namespace bulkhead::test {
namespace {

using enum wire::SlabDirection;
constexpr std::uint64_t both = wire::feature_lending | wire::feature_returning;
const std::vector<float> given{4, 5, 6};

/// A worker that lends and returns.
void agree(FakeWorker& w) {
    w.welcome.features = both;
    w.greet();
}

/// It gives `given` in slab 1 for its first request.
void give(FakeWorker& w) {
    agree(w);
    w.answer(w.expect<channel::Infer>().request_id, {w.output("y", given)});
}

Reply reply_of(Channel& channel) { return infer(channel, filled(channel, {1, 2, 3})).value(); }

std::uint64_t forward(Channel& to, const Output& output) {
    const std::array<NamedInput, 1> inputs{{{"x", &output}}};
    return to.submit({.inputs = inputs}).value();
}

/// A worker that takes a loan; the id of it.
std::uint32_t take_loan(FakeWorker& w) {
    const auto lend = w.expect<channel::SlabLend>();
    EXPECT_GE(lend.slab_id, wire::lent_slab_id_min);
    EXPECT_EQ(w.brought.size(), 1U);
    EXPECT_TRUE(HostSlab::adopt(std::move(w.brought.at(0)), lend.size_bytes, output));
    w.send(channel::encode(channel::SlabAccepted{lend.request_id, lend.slab_id}));
    return lend.slab_id;
}

TEST(Forwarding, AnOutputIsReadWhereItLiesByAnotherWorker) {
    std::promise<wire::LeaseRef> written;
    FakeWorker a{[&](FakeWorker& w) {
        agree(w);
        const channel::Tensor y = w.output("y", given);
        written.set_value(y.lease);
        w.answer(w.expect<channel::Infer>().request_id, {y});
    }};
    FakeWorker b{[&](FakeWorker& w) {
        agree(w);
        const auto lend = w.expect<channel::SlabLend>();
        const HostSlab slab = HostSlab::adopt(std::move(w.brought.at(0)), lend.size_bytes, output).value();
        w.send(channel::encode(channel::SlabAccepted{lend.request_id, lend.slab_id}));
        const wire::LeaseRef lent = written.get_future().get();
        for (int i = 0; i < 2; ++i) {  // lent once
            const auto request = w.expect<channel::Infer>();
            const channel::Tensor& x = request.tensors.at(0);
            EXPECT_EQ(x.name, "x");
            EXPECT_EQ(x.lease.slab_id, lend.slab_id);
            EXPECT_EQ(x.lease.offset_bytes, lent.offset_bytes);
            EXPECT_EQ(x.lease.size_bytes, lent.size_bytes);
            EXPECT_EQ(x.lease.generation, lent.generation);
            EXPECT_EQ(std::memcmp(slab.bytes().data() + x.lease.offset_bytes, given.data(), x.lease.size_bytes), 0);
            w.answer(request.request_id, {});
        }
    }};
    Channel from = adopt(a).value();
    Channel to = adopt(b).value();
    const Reply reply = reply_of(from);

    EXPECT_TRUE(to.wait(forward(to, reply.outputs[0])));
    EXPECT_TRUE(to.wait(forward(to, reply.outputs[0])));
}

TEST(Forwarding, ItsLeaseGoesBackWhenTheSecondWorkerHasAnsweredAndNotEarlier) {
    Gate asked_again;
    FakeWorker a{[](FakeWorker& w) {
        give(w);
        w.answer(w.expect<channel::Infer>().request_id, {});  // no release before it
        EXPECT_EQ(w.expect<channel::Release>().leases.size(), 1U);
        w.answer(w.expect<channel::Infer>().request_id, {});
    }};
    FakeWorker b{[&](FakeWorker& w) {
        agree(w);
        take_loan(w);
        const auto request = w.expect<channel::Infer>();
        asked_again.wait();
        w.answer(request.request_id, {});
    }};
    Channel from = adopt(a).value();
    Channel to = adopt(b).value();
    std::optional<Reply> reply = reply_of(from);
    const std::uint64_t forwarded = forward(to, reply->outputs[0]);

    reply.reset();  // the client keeps nothing of it
    reply_of(from);
    asked_again.open();
    ASSERT_TRUE(to.wait(forwarded));
    reply_of(from);
}

TEST(Forwarding, AWithdrawnSlabIsReturnedWhenNeitherTheClientNorTheBorrowerNeedsIt) {
    Gate returned;
    FakeWorker a{[](FakeWorker& w) {
        give(w);
        w.send(channel::encode(channel::SlabWithdraw{1}));
        w.answer(w.expect<channel::Infer>().request_id, {});
        w.answer(w.expect<channel::Infer>().request_id, {});  // the output is held: nothing is returned before it
        EXPECT_EQ(w.expect<channel::Release>().leases.size(), 1U);
        EXPECT_EQ(w.expect<channel::SlabReturn>().slab_id, 1U);
        w.answer(w.expect<channel::Infer>().request_id, {});
    }};
    FakeWorker b{[&](FakeWorker& w) {
        agree(w);
        const std::uint32_t loan = take_loan(w);
        w.answer(w.expect<channel::Infer>().request_id, {});
        EXPECT_EQ(w.expect<channel::SlabReturn>().slab_id, loan);  // nothing of this channel uses it
        returned.open();
    }};
    Channel from = adopt(a).value();
    Channel to = adopt(b).value();
    std::optional<Reply> reply = reply_of(from);
    ASSERT_TRUE(to.wait(forward(to, reply->outputs[0])));

    reply_of(from);  // reads the withdrawal
    returned.wait();
    EXPECT_EQ(reply->outputs[0].as<float>()[2], 6) << "still mapped here";
    reply_of(from);
    reply.reset();
    reply_of(from);
}

TEST(Forwarding, ALoanInUseIsReturnedOnceItsRequestIsAnswered) {
    Gate withdrawn;
    FakeWorker a{[](FakeWorker& w) {
        give(w);
        w.send(channel::encode(channel::SlabWithdraw{1}));
        w.answer(w.expect<channel::Infer>().request_id, {});
        EXPECT_EQ(w.expect<channel::Release>().leases.size(), 1U);
        EXPECT_EQ(w.expect<channel::SlabReturn>().slab_id, 1U);
    }};
    FakeWorker b{[&](FakeWorker& w) {
        agree(w);
        const std::uint32_t loan = take_loan(w);
        const auto request = w.expect<channel::Infer>();
        withdrawn.wait();
        w.answer(request.request_id, {});
        EXPECT_EQ(w.expect<channel::SlabReturn>().slab_id, loan);
    }};
    Channel from = adopt(a).value();
    Channel to = adopt(b).value();
    std::optional<Reply> reply = reply_of(from);
    const std::uint64_t forwarded = forward(to, reply->outputs[0]);
    reply.reset();
    reply_of(from);
    withdrawn.open();

    EXPECT_TRUE(to.wait(forwarded));

    b.finish();
    a.finish();
}

TEST(Forwarding, TheEndOfTheFirstWorkerEndsTheLoanAndLeavesTheBytesToWhoReadsThem) {
    FakeWorker a{[](FakeWorker& w) {
        give(w);
        w.expect<channel::Infer>();  // dies of it
    }};
    Gate dead;
    FakeWorker b{[&](FakeWorker& w) {
        agree(w);
        const auto lend = w.expect<channel::SlabLend>();
        const HostSlab slab = HostSlab::adopt(std::move(w.brought.at(0)), lend.size_bytes, output).value();
        w.send(channel::encode(channel::SlabAccepted{lend.request_id, lend.slab_id}));
        const auto request = w.expect<channel::Infer>();
        dead.wait();
        EXPECT_EQ(std::memcmp(slab.bytes().data() + request.tensors.at(0).lease.offset_bytes, given.data(), 12), 0);
        w.answer(request.request_id, {});
        EXPECT_EQ(w.expect<channel::SlabReturn>().slab_id, lend.slab_id);
        const auto again = w.expect<channel::SlabLend>();  // the output is there still, and may be sent again
        EXPECT_GT(again.slab_id, lend.slab_id);
        w.send(channel::encode(channel::SlabAccepted{again.request_id, again.slab_id}));
        w.answer(w.expect<channel::Infer>().request_id, {});
        EXPECT_EQ(w.expect<channel::SlabReturn>().slab_id, again.slab_id);
    }};
    Channel from = adopt(a).value();
    Channel to = adopt(b).value();
    const Reply reply = reply_of(from);
    const std::uint64_t forwarded = forward(to, reply.outputs[0]);
    EXPECT_EQ(infer(from, filled(from, {})).error().code, ErrorCode::worker_lost);
    dead.open();

    EXPECT_TRUE(to.wait(forwarded));
    EXPECT_TRUE(to.wait(forward(to, reply.outputs[0])));

    b.finish();
}

TEST(Forwarding, TheEndOfTheSecondWorkerLeavesTheFirstOnesOutput) {
    FakeWorker a{[](FakeWorker& w) {
        give(w);
        EXPECT_EQ(w.expect<channel::Release>().leases.size(), 1U);
        w.answer(w.expect<channel::Infer>().request_id, {});
    }};
    FakeWorker b{[](FakeWorker& w) {
        agree(w);
        take_loan(w);
        w.expect<channel::Infer>();
    }};
    Channel from = adopt(a).value();
    Channel to = adopt(b).value();
    std::optional<Reply> reply = reply_of(from);

    EXPECT_EQ(to.wait(forward(to, reply->outputs[0])).error().code, ErrorCode::worker_lost);

    EXPECT_EQ(reply->outputs[0].as<float>()[0], 4);
    reply.reset();
    reply_of(from);
}

TEST(Forwarding, AClientThatClosesTheFirstChannelReturnsTheLoan) {
    FakeWorker a{[](FakeWorker& w) {
        give(w);
        w.await_hang_up();
    }};
    FakeWorker b{[](FakeWorker& w) {
        agree(w);
        const std::uint32_t loan = take_loan(w);
        w.answer(w.expect<channel::Infer>().request_id, {});
        EXPECT_EQ(w.expect<channel::SlabReturn>().slab_id, loan);
    }};
    Channel to = adopt(b).value();
    {
        Channel from = adopt(a).value();
        const Reply reply = reply_of(from);
        ASSERT_TRUE(to.wait(forward(to, reply.outputs[0])));
    }
    b.finish();
}

TEST(Forwarding, AWorkerThatTakesNoLoansOrHasNoRoomForOneGetsACopy) {
    for (const bool agrees : {false, true}) {
        FakeWorker a{give};
        FakeWorker b{[&](FakeWorker& w) {
            if (agrees) w.welcome.features = both;
            w.greet();
            if (agrees) {
                const Error full{ErrorCode::resources_exhausted, "full", ""};
                w.send(channel::encode(channel::Failure{w.expect<channel::SlabLend>().request_id, full}));
            }
            const auto request = w.expect<channel::Infer>();
            EXPECT_EQ(request.tensors.at(0).lease.slab_id, 0U);
            EXPECT_EQ(w.values_of(request.tensors.at(0)), given);
            w.answer(request.request_id, {});
        }};
        Channel from = adopt(a).value();
        Channel to = adopt(b).value();
        const Reply reply = reply_of(from);

        EXPECT_TRUE(to.wait(forward(to, reply.outputs[0])));
    }
}

TEST(Forwarding, ARefusedLoanIsTheErrorOfThatRequestAlone) {
    FakeWorker a{give};
    FakeWorker b{[](FakeWorker& w) {
        agree(w);
        const Error refused{ErrorCode::protocol_violation, "taking a slab", ""};
        w.send(channel::encode(channel::Failure{w.expect<channel::SlabLend>().request_id, refused}));
        w.answer(w.expect<channel::Infer>().request_id, {});
    }};
    Channel from = adopt(a).value();
    Channel to = adopt(b).value();
    const Reply reply = reply_of(from);
    const std::array<NamedInput, 1> inputs{{{"x", &reply.outputs[0]}}};

    EXPECT_EQ(to.submit({.inputs = inputs}).error().code, ErrorCode::protocol_violation);

    EXPECT_TRUE(infer(to, filled(to, {})));
}

TEST(Forwarding, AnOutputMayGoBackToItsOwnWorker) {
    FakeWorker a{[](FakeWorker& w) {
        give(w);
        const std::uint32_t loan = take_loan(w);
        const auto request = w.expect<channel::Infer>();
        EXPECT_EQ(request.tensors.at(0).lease.slab_id, loan);
        w.answer(request.request_id, {});
    }};
    Channel channel = adopt(a).value();
    const Reply reply = reply_of(channel);

    EXPECT_TRUE(channel.wait(forward(channel, reply.outputs[0])));
}

TEST(Returning, AnAddedInputSlabThatStaysEmptyIsGivenBackWithTheNextRequest) {
    FakeWorker worker{[](FakeWorker& w) {
        agree(w);
        const auto request = w.expect<channel::SlabRequest>();
        w.offer(2, input, request.size_bytes, request.request_id);
        w.answer(w.expect<channel::Infer>().request_id, {});  // both are in use
        EXPECT_EQ(w.expect<channel::SlabReturn>().slab_id, 2U);
        w.answer(w.expect<channel::Infer>().request_id, {});
        const auto again = w.expect<channel::SlabRequest>();
        w.offer(3, input, again.size_bytes, again.request_id);
    }};
    Channel channel =
        Channel::adopt(worker.client_end(), {.client = "test", .deadline = std::chrono::seconds{10}, .slab_idle = {}})
            .value();
    const std::array<std::int64_t, 1> half{FakeWorker::slab_bytes / 8};
    const std::array<std::int64_t, 1> most{FakeWorker::slab_bytes / 4 - 1024};
    const Input first = channel.allocate(wire::DType::float32, half).value();
    {
        const Input added = channel.allocate(wire::DType::float32, most).value();
        ASSERT_TRUE(infer(channel, first));
    }

    EXPECT_TRUE(infer(channel, first));

    EXPECT_TRUE(channel.allocate(wire::DType::float32, most));
}

TEST(Returning, AWorkerThatDidNotAgreeIsTakenAtItsWord) {
    FakeWorker worker{[](FakeWorker& w) {
        w.greet();
        const auto request = w.expect<channel::SlabRequest>();
        w.offer(2, input, request.size_bytes, request.request_id);
        w.answer(w.expect<channel::Infer>().request_id, {});
    }};
    Channel channel =
        Channel::adopt(worker.client_end(), {.client = "test", .deadline = std::chrono::seconds{10}, .slab_idle = {}})
            .value();
    const std::array<std::int64_t, 1> whole{FakeWorker::slab_bytes / 4};
    const Input first = channel.allocate(wire::DType::float32, whole).value();
    static_cast<void>(channel.allocate(wire::DType::float32, whole).value());

    EXPECT_TRUE(infer(channel, first));
}

TEST(Returning, AWorkerThatSpeaksOutOfTurnIsRefused) {
    const std::vector<std::function<void(FakeWorker&)>> wrongs{
        [](FakeWorker& w) { w.send(channel::encode(channel::SlabWithdraw{9})); },  // none
        [](FakeWorker& w) {
            w.send(channel::encode(channel::SlabWithdraw{1}));
            w.send(channel::encode(channel::SlabWithdraw{1}));
        },
        [](FakeWorker& w) {
            w.send(channel::encode(channel::SlabAccepted{1, wire::lent_slab_id_min}));
        },
        [](FakeWorker& w) { w.offer(wire::lent_slab_id_min, output); },
    };
    for (const auto& wrong : wrongs) {
        FakeWorker worker{[&](FakeWorker& w) {
            w.welcome.features = both;
            w.greet();
            wrong(w);
            w.await_hang_up();
        }};
        Channel channel = adopt(worker).value();
        EXPECT_EQ(infer(channel, filled(channel, {})).error().code, ErrorCode::protocol_violation);
    }
    FakeWorker unagreed{[](FakeWorker& w) {
        w.greet();
        w.send(channel::encode(channel::SlabWithdraw{1}));
        w.await_hang_up();
    }};
    Channel channel = adopt(unagreed).value();
    EXPECT_EQ(infer(channel, filled(channel, {})).error().code, ErrorCode::protocol_violation);
}

}  // namespace
}  // namespace bulkhead::test

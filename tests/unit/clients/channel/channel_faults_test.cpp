#include "bulkhead/channel.h"

#include <signal.h>

#include <array>
#include <optional>

#include <gtest/gtest.h>

#include "clients/cpp/channel/worker_session.h"
#include "tests/support/mappings.h"
#include "tests/support/open_descriptors.h"
#include "tests/unit/clients/channel_calls.h"
#include "tests/unit/clients/fake_worker.h"
#include "tests/unit/clients/no_free_descriptor.h"

namespace bulkhead {
namespace {

using namespace std::chrono_literals;
using namespace test;
using enum wire::SlabDirection;

/// The error with which opening fails against a worker that runs `script`, which then sees the client go.
Error refusal_of(const FakeWorker::Script& script) {
    FakeWorker worker{[&](FakeWorker& w) {
        script(w);
        w.await_hang_up();
    }};
    return adopt(worker).error();
}

/// The error of a request answered by `script`; the client must break the channel off.
Error violation_of(const std::function<void(FakeWorker&, const channel::Infer&)>& script) {
    FakeWorker worker{[&](FakeWorker& w) {
        w.greet();
        script(w, w.expect<channel::Infer>());
        w.await_hang_up();
    }};
    Channel channel = adopt(worker).value();
    return infer(channel, filled(channel, {1, 2, 3})).error();
}

TEST(ChannelFaults, ARefusalInPlaceOfTheWelcomeIsTheErrorOfOpening) {
    const Error error = refusal_of([](FakeWorker& w) {
        w.expect<channel::Hello>();
        w.send(
            channel::encode(channel::Failure{0, {ErrorCode::busy, "fake serves one channel at a time", "try later"}}));
    });

    EXPECT_EQ(error, (Error{ErrorCode::busy, "opening a channel: fake serves one channel at a time", "try later"}));
}

TEST(ChannelFaults, AWorkerThatDiesBeforeItsWelcomeIsLost) {
    FakeWorker worker{[](FakeWorker& w) { w.expect<channel::Hello>(); }};

    EXPECT_EQ(adopt(worker).error().code, ErrorCode::worker_lost);
}

TEST(ChannelFaults, AWorkerThatDiesAmongItsSlabsIsLost) {
    FakeWorker worker{[](FakeWorker& w) {
        w.expect<channel::Hello>();
        w.send(channel::encode(w.welcome).value());
        w.offer(0, input);
    }};

    EXPECT_EQ(adopt(worker).error().code, ErrorCode::worker_lost);
}

TEST(ChannelFaults, AWorkerThatNeverWelcomesIsGivenUp) {
    FakeWorker worker{[](FakeWorker& w) { w.await_hang_up(); }};

    EXPECT_EQ(Channel::adopt(worker.client_end(), {.client = "test", .deadline = 1ms}).error().code,
              ErrorCode::deadline_exceeded);
}

TEST(ChannelFaults, EveryRequestOfADeadWorkerIsLostAndSoIsTheChannel) {
    FakeWorker worker{[](FakeWorker& w) {
        w.greet();
        for (int i = 0; i < 3; ++i) w.expect<channel::Infer>();
    }};
    Channel channel = adopt(worker).value();
    const Input x = filled(channel, {});
    const std::array<std::uint64_t, 3> requests{submit(channel, x), submit(channel, x), submit(channel, x)};

    for (const std::uint64_t request : requests) EXPECT_EQ(channel.wait(request).error().code, ErrorCode::worker_lost);
    EXPECT_EQ(channel.submit({.inputs = only(x)}).error().code, ErrorCode::worker_lost);
}

TEST(ChannelFaults, WhatWasDeliveredBeforeTheDeathIsStillReadable) {
    FakeWorker worker{[](FakeWorker& w) {
        w.greet();
        const auto answered = w.expect<channel::Infer>();
        w.expect<channel::Infer>();
        w.answer(answered.request_id, {w.output("p", {42})});
    }};
    Channel channel = adopt(worker).value();
    const Input x = filled(channel, {});
    const std::uint64_t answered = submit(channel, x), lost = submit(channel, x);
    worker.finish();  // dead, its slabs unmapped

    EXPECT_EQ(channel.wait(lost).error().code, ErrorCode::worker_lost);
    const Reply reply = channel.wait(answered).value();
    EXPECT_EQ(reply.outputs[0].as<float>()[0], 42);
}

TEST(ChannelFaults, AnswersAreReadEvenWhenTheDeathIsFoundBySending) {
    FakeWorker worker{[](FakeWorker& w) {
        w.greet();
        w.answer(w.expect<channel::Infer>().request_id, {w.output("p", {42})});
    }};
    Channel channel = adopt(worker).value();
    const Input x = filled(channel, {});
    const std::uint64_t answered = submit(channel, x);
    worker.finish();

    EXPECT_EQ(channel.submit({.inputs = only(x)}).error().code, ErrorCode::worker_lost);
    EXPECT_EQ(channel.wait(answered).value().outputs[0].as<float>()[0], 42);
}

TEST(ChannelFaults, ADeadWorkerRaisesNoSignalInTheClient) {
    FakeWorker worker{[](FakeWorker& w) { w.greet(); }};
    Channel channel = adopt(worker).value();
    worker.finish();
    struct sigaction before {};
    ::sigaction(SIGPIPE, nullptr, &before);
    ASSERT_EQ(before.sa_handler, SIG_DFL) << "a SIGPIPE would end this process";
    const Input x = filled(channel, {});

    EXPECT_EQ(channel.submit({.inputs = only(x)}).error().code, ErrorCode::worker_lost);
}

TEST(ChannelFaults, AnErrorOfTheChannelThatPrecedesItsEndIsTheReason) {
    FakeWorker worker{[](FakeWorker& w) {
        w.greet();
        w.expect<channel::Infer>();
        w.send(channel::encode(channel::Failure{0, {ErrorCode::protocol_violation, "17 stale releases", ""}}));
    }};
    Channel channel = adopt(worker).value();

    EXPECT_EQ(infer(channel, filled(channel, {})).error().code, ErrorCode::protocol_violation);
}

TEST(ChannelFaults, AnErrorOfTheChannelThatIsFollowedByAnswersEndsNothing) {
    FakeWorker worker{[](FakeWorker& w) {
        w.greet();
        const auto request = w.expect<channel::Infer>();
        w.send(channel::encode(channel::Failure{0, {ErrorCode::protocol_violation, "a stale release", ""}}));
        w.answer(request.request_id, {});
    }};
    Channel channel = adopt(worker).value();

    EXPECT_TRUE(infer(channel, filled(channel, {})));
}

TEST(ChannelFaults, ASlabThatThisProcessHasNoDescriptorForIsANamedError) {
    Gate made, full;
    FakeWorker worker{[&](FakeWorker& w) {
        w.slabs.push_back(HostSlab::create(FakeWorker::slab_bytes, input, "fake").value());
        const std::array<int, 1> fds{w.slabs.back().fd()};
        made.open();
        full.wait();
        w.expect<channel::Hello>();
        w.send(channel::encode(w.welcome).value());
        w.send(channel::encode(channel::SlabOffer{0, 0, input, wire::SlabKind::host_memfd, FakeWorker::slab_bytes}),
               fds);
        w.await_hang_up();
    }};
    UniqueFd end = worker.client_end();
    made.wait();
    const NoFreeDescriptor none;
    full.open();

    const Error error = Channel::adopt(std::move(end), {.client = "test", .deadline = 10s}).error();

    EXPECT_EQ(error.code, ErrorCode::resources_exhausted);
    EXPECT_NE(error.attempt.find("no free descriptor"), std::string::npos) << error.attempt;
}

TEST(ChannelFaults, SlabsThatAreNotWhatTheMessageSaysAreRefused) {
    constexpr std::uint64_t size = FakeWorker::slab_bytes;
    const auto offer_of = [](wire::SlabDirection direction, wire::SlabKind kind, std::uint64_t bytes) {
        return channel::encode(channel::SlabOffer{0, 0, direction, kind, bytes});
    };
    const HostSlab memory = HostSlab::create(FakeWorker::slab_bytes, input, "fake").value();
    const std::array<int, 1> fd{memory.fd()};
    const std::array<int, 2> two{memory.fd(), memory.fd()};
    using enum wire::SlabKind;

    struct Offer {
        const char* what;
        std::vector<std::byte> message;
        std::span<const int> fds;
        bool again = false;  ///< behind one that takes its id
    };
    for (const Offer& one : {Offer{"larger than its memory", offer_of(input, host_memfd, size * 2), fd},
                             Offer{"an output that the client could write", offer_of(output, host_memfd, size), fd},
                             Offer{"of a kind that was not agreed", offer_of(input, cuda_vmm, size), fd},
                             Offer{"without a descriptor", offer_of(input, host_memfd, size), {}},
                             Offer{"with two", offer_of(input, host_memfd, size), two},
                             Offer{"beyond the bound that welcome named", offer_of(input, host_memfd, 1 << 21), fd},
                             Offer{"with an id that is in use", offer_of(input, host_memfd, size), fd, true}}) {
        const Error refused = refusal_of([&](FakeWorker& w) {
            w.expect<channel::Hello>();
            w.send(channel::encode(w.welcome).value());
            if (one.again) w.offer(0, input);
            w.send(one.message, one.fds);
        });
        EXPECT_EQ(refused.code, ErrorCode::protocol_violation) << one.what;
    }
}

TEST(ChannelFaults, AWorkerThatSpeaksOutOfTurnIsRefused) {
    EXPECT_EQ(refusal_of([](FakeWorker& w) { w.answer(1, {}); }).code, ErrorCode::protocol_violation);
    EXPECT_EQ(refusal_of([](FakeWorker& w) {
                  w.send(channel::encode(w.welcome).value());
                  w.send(channel::encode(w.welcome).value());
              }).code,
              ErrorCode::protocol_violation);
    EXPECT_EQ(refusal_of([](FakeWorker& w) {
                  w.send({std::byte{1}, std::byte{2}});
              }).code,
              ErrorCode::protocol_violation);
}

TEST(ChannelFaults, AResultThatLiesBreaksTheChannelOff) {
    using channel::Infer;
    const auto lying = [](const std::function<void(channel::Tensor&)>& lie) {
        return violation_of([&](FakeWorker& w, const Infer& request) {
                   channel::Tensor tensor = w.output("p", {1});
                   lie(tensor);
                   w.answer(request.request_id, {tensor});
               })
            .code;
    };
    EXPECT_EQ(lying([](auto& t) { t.lease.offset_bytes = FakeWorker::slab_bytes; }), ErrorCode::protocol_violation);
    EXPECT_EQ(lying([](auto& t) { t.lease.offset_bytes = UINT64_MAX - 63; }), ErrorCode::protocol_violation);
    EXPECT_EQ(lying([](auto& t) { t.lease.offset_bytes = 4; }), ErrorCode::protocol_violation) << "not aligned";
    EXPECT_EQ(lying([](auto& t) { t.lease.slab_id = 0; }), ErrorCode::protocol_violation) << "the input slab";
    EXPECT_EQ(lying([](auto& t) { t.lease.slab_id = 9; }), ErrorCode::protocol_violation);
    EXPECT_EQ(lying([](auto& t) { t.lease.size_bytes = 8; }), ErrorCode::protocol_violation);
    EXPECT_EQ(lying([](auto& t) { t.dims = {1 << 20}, t.lease.size_bytes = 4 << 20; }), ErrorCode::protocol_violation);
    EXPECT_EQ(violation_of([](FakeWorker& w, const Infer& r) { w.answer(r.request_id + 1, {}); }).code,
              ErrorCode::protocol_violation)
        << "for a request that was never sent";
    EXPECT_EQ(violation_of([](FakeWorker& w, const Infer& r) {
                  w.send(channel::encode(channel::InferResult{.request_id = r.request_id, .more = true}).value());
              }).code,
              ErrorCode::protocol_violation)
        << "streaming was not agreed";
}

TEST(ChannelFaults, ASecondAnswerToOneRequestBreaksTheChannelOff) {
    FakeWorker worker{[](FakeWorker& w) {
        w.greet();
        const auto request = w.expect<channel::Infer>();
        w.answer(request.request_id, {});
        w.answer(request.request_id, {});
        w.await_hang_up();
    }};
    Channel channel = adopt(worker).value();
    const Input x = filled(channel, {});
    const std::uint64_t request = submit(channel, x);
    EXPECT_TRUE(channel.wait(request));

    EXPECT_EQ(infer(channel, x).error().code, ErrorCode::protocol_violation);
}

TEST(ChannelFaults, NothingIsLeftOnceChannelAndOutputsAreDropped) {
    const std::size_t descriptors = open_descriptors();
    {
        FakeWorker worker{[](FakeWorker& w) {
            w.greet();
            w.answer(w.expect<channel::Infer>().request_id, {w.output("p", {42})});
            w.await_hang_up();
        }};
        std::optional<Reply> reply;
        {
            Channel channel = adopt(worker).value();
            reply = infer(channel, filled(channel, {})).value();
        }
        worker.finish();
        EXPECT_EQ(reply->outputs[0].as<float>()[0], 42) << "an output outlives channel and worker";
    }
    EXPECT_EQ(mappings("/memfd:fake"), 0u);
    EXPECT_EQ(open_descriptors(), descriptors);
}

TEST(ChannelFaults, ARefusedOpeningLeavesNothing) {
    const std::size_t descriptors = open_descriptors();

    static_cast<void>(refusal_of([](FakeWorker& w) {
        w.welcome.slab_bytes_max = FakeWorker::slab_bytes;
        w.greet();  // the second slab exceeds the bound
    }));

    EXPECT_EQ(mappings("/memfd:fake"), 0u);
    EXPECT_EQ(open_descriptors(), descriptors);
}

TEST(ChannelFaults, ARefusalThatComesAfterItsCallFailsNoOtherCall) {
    constexpr std::int64_t large = FakeWorker::slab_bytes;
    FakeWorker worker{[](FakeWorker& w) {
        w.greet();
        const Error full{ErrorCode::resources_exhausted, "full", ""};
        w.send(channel::encode(channel::Failure{w.expect<channel::SlabRequest>().request_id, full}));
        const auto second = w.expect<channel::SlabRequest>();
        w.offer(2, input, second.size_bytes, second.request_id);
        w.send(channel::encode(channel::Failure{w.expect<channel::SlabRequest>().request_id, full}));
    }};
    const ChannelOptions options{.client = "test", .deadline = 10s};
    const auto state = WorkerSession::open(worker.client_end(), 1, options).value();
    const std::array<std::int64_t, 1> dims{large / 4 + 1};
    bool asked = false;
    ASSERT_EQ(state->allocate_or_ask(wire::DType::float32, dims, false, asked).value(), nullptr);
    ASSERT_TRUE(asked);  // and goes away: its deadline passed

    const auto lease = state->allocate(wire::DType::float32, dims);
    EXPECT_TRUE(lease) << lease.error().text();
    EXPECT_EQ(state->allocate(wire::DType::float32, dims).error().code, ErrorCode::resources_exhausted) << "its own";
}

}  // namespace
}  // namespace bulkhead

/// The channel with an Asio loop: several requests at a time, cancellation, and workers that die.

#include <boost/asio/bind_cancellation_slot.hpp>
#include <boost/asio/cancellation_signal.hpp>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "bulkhead/async_channel.h"
#include "tests/support/clients/channel_calls.h"
#include "tests/support/clients/introducing.h"
#include "tests/support/clients/loop.h"

namespace bulkhead {
namespace {

namespace asio = boost::asio;
using namespace std::chrono_literals;
using namespace test;
using testing::ElementsAre;

TEST(AsyncChannel, AFullSlabIsGrownWhileTheLoopRunsOn) {
    Gate replied;
    FakeWorker worker{[&](FakeWorker& w) {
        w.greet();
        const auto growth = w.expect<channel::SlabRequest>();
        w.answer(w.expect<channel::Infer>().request_id, {});  // meanwhile
        replied.wait();
        w.offer(2, wire::SlabDirection::input, growth.size_bytes, growth.request_id);
        w.await_hang_up();
    }};
    Loop loop;
    AsyncChannel channel = loop.adopt(worker).value();
    std::vector<std::string> order;
    channel.async_allocate(wire::DType::uint8, {2 * static_cast<std::int64_t>(FakeWorker::slab_bytes)},
                           [&](Result<Input> input) {
                               EXPECT_EQ(input.value().bytes().size(), 2 * FakeWorker::slab_bytes);
                               order.push_back("input");
                           });
    loop.context.restart(), loop.context.poll();
    channel.async_infer({}, [&](Result<Reply> reply) {
        EXPECT_TRUE(reply);
        order.push_back("reply");
        replied.open();
    });
    EXPECT_THAT(order, ElementsAre()) << "never from within the function that starts it";
    loop.context.restart(), loop.context.run();
    EXPECT_THAT(order, ElementsAre("reply", "input"));
}

TEST(AsyncChannel, WhatIsInFlightWhenItIsDroppedEndsWithCancelled) {
    FakeWorker worker{[](FakeWorker& w) {
        w.greet();
        w.expect<channel::Infer>();
        w.await_hang_up();
    }};
    Loop loop;
    std::optional<AsyncChannel> channel = loop.adopt(worker).value();
    std::optional<ErrorCode> ended;
    channel->async_infer({}, [&](Result<Reply> reply) { ended = reply.error().code; });
    loop.context.restart(), loop.context.poll();
    channel.reset();
    loop.context.restart(), loop.context.run();
    EXPECT_EQ(ended, ErrorCode::cancelled);
}

TEST(AsyncChannel, ALoopThatIsDestroyedWithRequestsInFlightLeavesNothing) {
    const std::size_t before = open_descriptors();
    {
        FakeWorker worker{[](FakeWorker& w) {
            w.greet();
            w.expect<channel::Infer>();
            w.await_hang_up();
        }};
        {
            auto loop = std::make_unique<Loop>();
            AsyncChannel channel = loop->adopt(worker).value();
            channel.async_infer({}, [](Result<Reply>) { ADD_FAILURE() << "nobody ran the loop"; });
            loop->context.poll();
            AsyncChannel gone = std::move(channel);
        }
        worker.finish();
    }
    EXPECT_EQ(open_descriptors(), before);
}

TEST(AsyncChannel, WhatIsStartedWhileTheNextWorkerLoadsWaitsForItAndMayBeCancelled) {
    Gate cancelled;
    FakeWorker first{[](FakeWorker& w) {
        w.greet();
        w.expect<channel::Infer>();
    }};
    FakeWorker second{[](FakeWorker& w) {
        w.greet();
        for (int i = 0; i < 2; ++i) w.answer(w.expect<channel::Infer>().request_id, {});
        w.await_hang_up();
    }};
    FakeDaemon daemon{[&](FakeDaemon& d) {
        introduce(d, first);
        const auto asked = d.request("channel.open");
        cancelled.wait();
        introduce_to(asked, d, second);
        d.await_hang_up();
    }};
    Loop loop;
    AsyncControl control{loop.context.get_executor(), daemon.path()};
    AsyncChannel channel = loop.open(control).value();
    asio::cancellation_signal signal;
    int answered = 0;
    std::optional<ErrorCode> given_up, refused;
    channel.async_infer({.retry_safe = true}, [&](Result<Reply> reply) { answered += reply.has_value(); });
    // No other loop reports the death.
    channel.async_reopen(std::nullopt, [&](Result<> done) { EXPECT_TRUE(done); });
    first.finish();
    channel.async_infer({}, [&](Result<Reply> reply) {
        refused = reply.error().code;
        channel.async_infer({.retry_safe = true}, [&](Result<Reply> again) { answered += again.has_value(); });
        channel.async_infer({.retry_safe = true}, asio::bind_cancellation_slot(signal.slot(), [&](Result<Reply> again) {
                                given_up = again.error().code;
                                cancelled.open();
                            }));
        asio::post(loop.context, [&] { signal.emit(asio::cancellation_type::terminal); });
    });
    loop.context.restart(), loop.context.run();
    EXPECT_EQ(refused, ErrorCode::worker_lost) << "it was not said to be retry-safe";
    EXPECT_EQ(given_up, ErrorCode::cancelled);
    EXPECT_EQ(answered, 2);
}

TEST(AsyncChannel, AReopenThatJoinsAnotherKeepsItsOwnDeadline) {
    Gate given_up;
    FakeWorker first{[](FakeWorker& w) { w.greet(); }};
    FakeWorker second{[](FakeWorker& w) {
        w.greet();
        w.await_hang_up();
    }};
    FakeDaemon daemon{[&](FakeDaemon& d) {
        introduce(d, first);
        given_up.wait();
        introduce(d, second);
        d.await_hang_up();
    }};
    Loop loop;
    AsyncControl control{loop.context.get_executor(), daemon.path()};
    AsyncChannel channel = loop.open(control).value();
    first.finish();
    std::optional<Result<>> patient, hasty;
    channel.async_reopen(std::nullopt, [&](Result<> done) { patient = std::move(done); });
    channel.async_reopen(20ms, [&](Result<> done) {
        hasty = std::move(done);
        given_up.open();
    });
    EXPECT_EQ(loop.until(hasty).error().code, ErrorCode::deadline_exceeded);
    EXPECT_TRUE(loop.until(patient));
}

TEST(AsyncChannel, AReopenThatComesTooLateEndsOnlyTheOneThatNamedTheDeadline) {
    FakeWorker first{[](FakeWorker& w) { w.greet(); }};
    FakeWorker second{[](FakeWorker& w) {
        w.greet();
        w.answer(w.expect<channel::Infer>().request_id, {});
        w.await_hang_up();
    }};
    FakeDaemon daemon{[&](FakeDaemon& d) {
        introduce(d, first);
        d.refuse(d.request("channel.open"), {ErrorCode::deadline_exceeded, "loading fake: not ready in 9 s", ""});
        introduce(d, second);
        d.await_hang_up();
    }};
    Loop loop;
    AsyncControl control{loop.context.get_executor(), daemon.path()};
    AsyncChannel channel = loop.open(control).value();
    first.finish();
    std::optional<Result<>> patient, hasty;
    std::optional<Result<Reply>> reply;
    channel.async_reopen(9s, [&](Result<> done) { hasty = std::move(done); });
    channel.async_reopen(std::nullopt, [&](Result<> done) { patient = std::move(done); });
    channel.async_infer({.retry_safe = true}, [&](Result<Reply> done) { reply = std::move(done); });
    EXPECT_EQ(loop.until(hasty).error().code, ErrorCode::deadline_exceeded);
    EXPECT_TRUE(loop.until(patient));
    EXPECT_TRUE(loop.until(reply));
}

}  // namespace
}  // namespace bulkhead

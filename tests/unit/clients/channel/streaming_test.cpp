/// Answers that come in parts: in order, bounded, and never twice.

#include <optional>

#include <boost/asio/bind_cancellation_slot.hpp>
#include <boost/asio/cancellation_signal.hpp>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "bulkhead/async_channel.h"
#include "clients/cpp/base/limits.h"
#include "tests/support/clients/both_clients.h"
#include "tests/support/clients/channel_calls.h"
#include "tests/support/clients/introducing.h"
#include "tests/support/clients/loop.h"

namespace bulkhead {
namespace {

namespace asio = boost::asio;
using namespace test;
using testing::HasSubstr;

void greet_streaming(FakeWorker& worker) {
    worker.welcome.features |= wire::feature_streaming;
    worker.greet();
}

void send_token(FakeWorker& worker, std::uint64_t request_id, int token, bool more = true) {
    worker.send(channel::encode(
                    channel::InferResult{.request_id = request_id, .more = more, .values = {{"token", token}}})
                    .value());
}

std::int64_t token_of(const Reply& reply) { return reply.values.at("token").as_int64(); }

template <typename C>
class ChannelStreaming : public testing::Test {};
TYPED_TEST_SUITE(ChannelStreaming, BothClients, ClientNames);

TYPED_TEST(ChannelStreaming, AWorkerThatDiesLeavesWhatCameAndSaysHowMuchThatWas) {
    struct Case {
        const char* parts;  ///< what each of them says, in JSON
        const char* said;
    };
    for (const Case& one : {Case{R"([{"token": 5}, {"token": 6}, {"token": 7}])", "after 3 parts of the answer"},
                            // A part may hold several tokens, and one of them be an array.
                            Case{R"([{"tokens": [5]}, {"tokens": [6, 7, 8]}, {"tokens": [[1, 2], [3, 4]]}])",
                                 "after 6 tokens of the answer"}}) {
        SCOPED_TRACE(one.said);
        const boost::json::array parts = boost::json::parse(one.parts).as_array();
        FakeWorker worker{[&](FakeWorker& w) {
            greet_streaming(w);
            const auto id = w.expect<channel::Infer>().request_id;
            for (const auto& part : parts)
                w.send(channel::encode(
                           channel::InferResult{.request_id = id, .more = true, .values = part.as_object()})
                           .value());
        }};
        TypeParam channel = adopt<TypeParam>(worker).value();
        const std::uint64_t id = channel.submit({.in_parts = true}).value();
        worker.finish();
        for (const auto& part : parts) EXPECT_EQ(channel.next(id).value().values, part);

        const Error error = channel.next(id).error();

        EXPECT_EQ(error.code, ErrorCode::worker_lost);
        EXPECT_THAT(error.attempt, HasSubstr(one.said));
    }
}

/// The next worker would begin again, and its first parts would come twice.
TYPED_TEST(ChannelStreaming, AnAnswerThatHasBegunIsNotSentOnceMore) {
    FakeWorker first{[](FakeWorker& w) {
        greet_streaming(w);
        send_token(w, w.expect<channel::Infer>().request_id, 7);
    }};
    FakeDaemon daemon{introducing({&first})};
    {
        TypeParam channel = opened<TypeParam>(daemon);
        const std::uint64_t id = channel.submit({.retry_safe = true, .in_parts = true}).value();
        EXPECT_EQ(token_of(channel.next(id).value()), 7);
        EXPECT_EQ(channel.next(id).error().code, ErrorCode::worker_lost);
        EXPECT_EQ(channel.replays(), 0u);
    }
}

TYPED_TEST(ChannelStreaming, ARequestWithoutAPartYetIsSentOnceMoreAndStreams) {
    FakeWorker first{[](FakeWorker& w) {
        greet_streaming(w);
        w.expect<channel::Infer>();
    }};
    FakeWorker second{[](FakeWorker& w) {
        greet_streaming(w);
        const auto id = w.expect<channel::Infer>().request_id;
        send_token(w, id, 1);
        send_token(w, id, 2, false);
        w.await_hang_up();
    }};
    FakeDaemon daemon{introducing({&first, &second})};
    {
        TypeParam channel = opened<TypeParam>(daemon);
        const std::uint64_t id = channel.submit({.retry_safe = true, .in_parts = true}).value();
        EXPECT_EQ(token_of(channel.next(id).value()), 1);
        EXPECT_EQ(token_of(channel.next(id).value()), 2);
        EXPECT_EQ(channel.replays(), 1u);
    }
}

TYPED_TEST(ChannelStreaming, PartsThatNobodyTakesAreBounded) {
    constexpr int sent = 5000;
    static_assert(sent > limits::parts_max);
    FakeWorker worker{[](FakeWorker& w) {
        greet_streaming(w);
        const auto request = w.expect<channel::Infer>();
        const auto other = w.expect<channel::Infer>();
        for (int token = 0; token < sent; ++token) send_token(w, request.request_id, token);
        EXPECT_EQ(w.expect<channel::Cancel>().request_id, request.request_id);
        w.send(channel::encode(channel::Failure{request.request_id, {ErrorCode::cancelled, "cancelled", ""}}));
        w.answer(other.request_id, {});
        w.await_hang_up();
    }};
    {
        TypeParam channel = adopt<TypeParam>(worker).value();
        const std::uint64_t id = channel.submit({.in_parts = true}).value();
        EXPECT_TRUE(channel.infer({})) << "another request reads the channel meanwhile";

        std::size_t taken = 0;
        Result<Reply> part = channel.next(id);
        for (; part; part = channel.next(id)) EXPECT_EQ(token_of(*part), static_cast<int>(taken++));
        EXPECT_EQ(taken, limits::parts_max);
        EXPECT_EQ(part.error().code, ErrorCode::resources_exhausted);
    }
}

TEST(AsyncChannelStreaming, AStreamBesideOtherRequests) {
    Gate answered;
    FakeWorker worker{[&](FakeWorker& w) {
        greet_streaming(w);
        const auto stream = w.expect<channel::Infer>().request_id;
        send_token(w, stream, 0);
        w.answer(w.expect<channel::Infer>().request_id, {});
        answered.wait();
        send_token(w, stream, 1, false);
        w.await_hang_up();
    }};
    Loop loop;
    AsyncChannel channel = loop.adopt(worker).value();
    AsyncStream stream = channel.stream({});
    EXPECT_EQ(token_of(loop.next(stream).value()), 0);

    std::optional<Result<Reply>> other;
    channel.async_infer({}, [&](Result<Reply> reply) { other = std::move(reply); });
    EXPECT_TRUE(loop.until(other));
    loop.context.restart();
    loop.context.run();  // nobody waits: the stream alone keeps no loop running
    answered.open();

    const Reply last = loop.next(stream).value();
    EXPECT_EQ(token_of(last), 1);
    EXPECT_FALSE(last.more);
    EXPECT_EQ(loop.next(stream).error().code, ErrorCode::input_invalid);
    channel = AsyncChannel{};
}

TEST(AsyncChannelStreaming, ARefusedRequestIsToldToWhoeverTakesTheFirstPart) {
    FakeWorker worker{[](FakeWorker& w) {
        w.welcome.in_flight_max = 1;
        greet_streaming(w);
        w.answer(w.expect<channel::Infer>().request_id, {});
        w.await_hang_up();
    }};
    Loop loop;
    AsyncChannel channel = loop.adopt(worker).value();
    AsyncStream first = channel.stream({}), refused = channel.stream({});
    EXPECT_EQ(loop.next(refused).error().code, ErrorCode::queue_full);
    EXPECT_TRUE(loop.next(first));
    channel = AsyncChannel{};
}

TEST(AsyncChannelStreaming, CancellingAWaitCancelsTheRequest) {
    FakeWorker worker{[](FakeWorker& w) {
        greet_streaming(w);
        const auto request = w.expect<channel::Infer>().request_id;
        send_token(w, request, 0);
        EXPECT_EQ(w.expect<channel::Cancel>().request_id, request);
        w.send(channel::encode(channel::Failure{request, {ErrorCode::cancelled, "cancelled", ""}}));
        w.await_hang_up();
    }};
    Loop loop;
    AsyncChannel channel = loop.adopt(worker).value();
    AsyncStream stream = channel.stream({});
    EXPECT_TRUE(loop.next(stream));

    asio::cancellation_signal signal;
    std::optional<Result<Reply>> outcome;
    stream.async_next(
        asio::bind_cancellation_slot(signal.slot(), [&](Result<Reply> part) { outcome = std::move(part); }));
    signal.emit(asio::cancellation_type::terminal);

    EXPECT_EQ(loop.until(outcome).error().code, ErrorCode::cancelled);
    channel = AsyncChannel{};
}

TEST(AsyncChannelStreaming, AStreamEndsWithItsChannel) {
    FakeWorker worker{[](FakeWorker& w) {
        greet_streaming(w);
        send_token(w, w.expect<channel::Infer>().request_id, 0);
        w.expect<channel::Cancel>();
        w.await_hang_up();
    }};
    Loop loop;
    AsyncChannel channel = loop.adopt(worker).value();
    {
        AsyncStream stream = channel.stream({});
        EXPECT_TRUE(loop.next(stream));
        channel = AsyncChannel{};
        EXPECT_EQ(loop.next(stream).error().code, ErrorCode::cancelled);
    }
}

}  // namespace
}  // namespace bulkhead

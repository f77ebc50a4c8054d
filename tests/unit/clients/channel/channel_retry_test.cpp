/// Workers that die with requests in flight: what is sent once more, and what never is.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/clients/both_clients.h"
#include "tests/support/clients/channel_calls.h"
#include "tests/support/clients/introducing.h"
#include "tests/support/mappings.h"

namespace bulkhead {
namespace {

using namespace std::chrono_literals;
using namespace test;
using testing::HasSubstr;

FakeWorker::Script dies_of(int requests) {
    return [requests](FakeWorker& w) {
        w.greet();
        for (int i = 0; i < requests; ++i) w.expect<channel::Infer>();
    };
}
const FakeWorker::Script die_of_it = dies_of(1);

/// Answers each request with nothing.
void answers_all(FakeWorker& w) {
    w.greet();
    while (const auto message = w.receive())
        if (const auto* request = std::get_if<channel::Infer>(&*message)) w.answer(request->request_id, {});
}

/// Answers one request, which brings this value, with 41 more, and gets nothing else.
FakeWorker::Script answers_only(float value) {
    return [value](FakeWorker& w) {
        w.greet();
        const auto request = w.expect<channel::Infer>();
        EXPECT_EQ(w.values_of(request.tensors.at(0))[0], value);
        w.answer(request.request_id, {w.output("p", {value + 41})});
        EXPECT_EQ(w.receive(), std::nullopt) << "neither another request nor leases of a dead worker";
    };
}

template <typename C>
class ChannelRetry : public testing::Test {};
TYPED_TEST_SUITE(ChannelRetry, BothClients, ClientNames);

Request retry_safe(std::span<const NamedInput> inputs, std::chrono::milliseconds deadline = 0ms) {
    return {.inputs = inputs, .deadline = deadline, .retry_safe = true};
}

TYPED_TEST(ChannelRetry, ALostRequestIsSentOnceMoreWithInputsOfSeveralSlabs) {
    const std::vector<float> large_values(20'000, 7.5f);
    FakeWorker first{[&](FakeWorker& w) {
        w.greet();
        const auto request = w.expect<channel::SlabRequest>();
        w.offer(2, wire::SlabDirection::input, request.size_bytes, request.request_id);
        const auto infer = w.expect<channel::Infer>();
        EXPECT_NE(infer.tensors.at(0).lease.slab_id, infer.tensors.at(1).lease.slab_id);
    }};
    FakeWorker second{[&](FakeWorker& w) {
        w.welcome.generation = 5;
        w.greet();
        const auto request = w.expect<channel::SlabRequest>();
        w.offer(2, wire::SlabDirection::input, request.size_bytes, request.request_id);
        const auto infer = w.expect<channel::Infer>();
        EXPECT_EQ(infer.method, "embed");
        EXPECT_TRUE(infer.retry_safe);
        EXPECT_EQ(infer.parameters.at("k").as_int64(), 1);
        EXPECT_GT(infer.deadline, 0ms);
        EXPECT_LE(infer.deadline, 60s);
        EXPECT_EQ(infer.tensors.at(0).name, "small");
        EXPECT_EQ(w.values_of(infer.tensors.at(0)), (std::vector<float>{1, 2, 3}));
        EXPECT_EQ(w.slabs.at(2).bytes().size(), w.slabs.at(2).size_bytes());
        const wire::LeaseRef& lease = infer.tensors.at(1).lease;
        EXPECT_EQ(lease.slab_id, 2u);
        std::vector<float> arrived(large_values.size());
        std::memcpy(arrived.data(), w.slabs.at(2).bytes().data() + lease.offset_bytes, lease.size_bytes);
        EXPECT_EQ(arrived, large_values);
        w.answer(infer.request_id, {w.output("p", {42})});
    }};
    FakeDaemon daemon{introducing({&first, &second})};
    TypeParam channel = opened<TypeParam>(daemon);
    const std::array<std::int64_t, 1> large{static_cast<std::int64_t>(large_values.size())};
    std::uint64_t request = 0;
    {
        const Input x = filled(channel, {1, 2, 3});
        Input y = channel.allocate(wire::DType::float32, large).value();
        std::ranges::copy(large_values, y.as<float>().begin());
        const std::array<NamedInput, 2> inputs{{{"small", &x}, {"large", &y}}};
        request = channel
                      .submit({.method = "embed",
                               .inputs = inputs,
                               .parameters = {{"k", 1}},
                               .deadline = 60s,
                               .retry_safe = true})
                      .value();
    }  // dropped while in flight: kept until the answer, whoever gives it

    const Result<Reply> reply = channel.wait(request);

    ASSERT_TRUE(reply) << reply.error().text();
    EXPECT_EQ(reply->find("p")->as<float>()[0], 42);
    EXPECT_EQ(channel.generation(), 5u);
    EXPECT_EQ(channel.replays(), 1u);
}

TYPED_TEST(ChannelRetry, OthersFailAndTheChannelCanBeReopenedWithTheInputsOfBefore) {
    FakeWorker first{die_of_it};
    FakeWorker second{[](FakeWorker& w) {
        w.greet();
        for (const float value : {4.0f, 5.0f}) {
            const auto request = w.expect<channel::Infer>();
            EXPECT_EQ(w.values_of(request.tensors.at(0))[0], value);
            w.answer(request.request_id, {});
        }
        w.await_hang_up();
    }};
    FakeDaemon daemon{introducing({&first, &second})};
    TypeParam channel = opened<TypeParam>(daemon);
    Input x = filled(channel, {1, 2, 3});
    const std::span<float> place = x.as<float>();

    const Error lost = infer(channel, x).error();
    EXPECT_EQ(lost.code, ErrorCode::worker_lost);
    EXPECT_THAT(lost.remedy, HasSubstr("reopen this channel"));
    EXPECT_EQ(channel.submit({.inputs = only(x)}).error().code, ErrorCode::worker_lost) << "until it is reopened";
    ASSERT_TRUE(channel.reopen());

    place[0] = 4;  // through the view of before
    EXPECT_TRUE(infer(channel, x));
    place[0] = 5;
    EXPECT_TRUE(infer(channel, x));
    EXPECT_TRUE(channel.reopen()) << "nothing to do while it lives";
    EXPECT_EQ(channel.replays(), 0u);
}

TYPED_TEST(ChannelRetry, AWorkerThatDrainsStillAnswersAfterTheChannelWasReopened) {
    Gate reopened;
    FakeWorker first{[&](FakeWorker& w) {
        w.greet();
        const auto slow = w.expect<channel::Infer>(), quick = w.expect<channel::Infer>();
        w.send(channel::encode(channel::Closing{ErrorCode::worker_draining, 1000ms}));
        w.answer(quick.request_id, {});
        reopened.wait();
        w.answer(slow.request_id, {w.output("p", {42})});
        w.await_hang_up();
    }};
    FakeWorker second{[](FakeWorker& w) {
        w.welcome.generation = 5;
        w.greet();
        w.await_hang_up();
    }};
    FakeDaemon daemon{introducing({&first, &second})};
    {
        TypeParam channel = opened<TypeParam>(daemon);
        const Input x = filled(channel, {});
        const std::uint64_t slow = submit(channel, x), quick = submit(channel, x);
        EXPECT_TRUE(channel.wait(quick));
        ASSERT_TRUE(channel.reopen());
        EXPECT_EQ(channel.generation(), 5u);
        reopened.open();
        EXPECT_EQ(channel.wait(slow).value().find("p")->template as<float>()[0], 42);
    }
}

TYPED_TEST(ChannelRetry, WhatTwoWorkersDiedOfIsNotSentToAThirdEither) {
    FakeWorker first{die_of_it};
    FakeWorker second{[](FakeWorker& w) {
        w.welcome.generation = 5;
        dies_of(2)(w);
    }};
    FakeWorker third{answers_only(2)};
    FakeDaemon daemon{introducing({&first, &second, &third})};
    TypeParam channel = opened<TypeParam>(daemon);
    const Input poison = filled(channel, {1}), harmless = filled(channel, {2});
    const std::uint64_t deadly = channel.submit(retry_safe(only(poison))).value();
    first.finish();
    // Finds the death, and sends both.
    const std::uint64_t other = channel.submit(retry_safe(only(harmless))).value();

    EXPECT_TRUE(channel.wait(other));
    const Error error = channel.wait(deadly).error();
    EXPECT_EQ(error.code, ErrorCode::worker_lost);
    EXPECT_THAT(error.attempt, HasSubstr("lost with generation 3 and sent once more to generation 5"));
}

TYPED_TEST(ChannelRetry, AllThatWereLostGoOutTogether) {
    FakeWorker first{dies_of(3)};
    FakeWorker second{[](FakeWorker& w) {
        w.greet();
        std::vector<channel::Infer> requests;
        for (int i = 0; i < 3; ++i) requests.push_back(w.expect<channel::Infer>());
        for (const auto& request : requests)
            w.answer(request.request_id, {w.output("p", {w.values_of(request.tensors.at(0))[0]})});
    }};
    FakeDaemon daemon{introducing({&first, &second})};
    TypeParam channel = opened<TypeParam>(daemon);
    std::vector<std::uint64_t> requests;
    for (const float value : {1.0f, 2.0f, 3.0f})
        requests.push_back(channel.submit(retry_safe(only(filled(channel, {value})))).value());

    for (const std::size_t i : {1u, 0u, 2u})
        EXPECT_EQ(channel.wait(requests[i]).value().outputs.at(0).template as<float>()[0], static_cast<float>(i + 1));
    EXPECT_EQ(channel.replays(), 3u);
}

TYPED_TEST(ChannelRetry, AnAnswerThatHadArrivedIsHandedOutAndItsRequestNotSentAgain) {
    FakeWorker first{[](FakeWorker& w) {
        w.greet();
        const auto answered = w.expect<channel::Infer>();
        w.expect<channel::Infer>();
        w.answer(answered.request_id, {w.output("p", {42})});
    }};
    FakeWorker second{answers_only(2)};
    FakeDaemon daemon{introducing({&first, &second})};
    TypeParam channel = opened<TypeParam>(daemon);
    const std::uint64_t answered = channel.submit(retry_safe(only(filled(channel, {1})))).value();
    const std::uint64_t lost = channel.submit(retry_safe(only(filled(channel, {2})))).value();

    EXPECT_EQ(channel.wait(lost).value().outputs.at(0).template as<float>()[0], 43);
    const Reply old = channel.wait(answered).value();
    EXPECT_EQ(old.outputs.at(0).as<float>()[0], 42) << "readable after its worker, and after the channel's reopening";
}

/// Submits one retry-safe request to a worker that runs `script`, and expects that no other
/// worker is asked for.
template <typename C>
Error never_sent_again(const FakeWorker::Script& script, bool stateful = false, bool cancel = false) {
    FakeWorker worker{script};
    FakeDaemon daemon{[&](FakeDaemon& d) { introduce(d, worker, stateful); }};
    C channel = opened<C>(daemon);
    daemon.finish();  // whoever asked it again would get `not_running`
    const Input x = filled(channel, {});
    const std::uint64_t request = channel.submit(retry_safe(only(x))).value();
    if (cancel) {
        EXPECT_TRUE(channel.cancel(request));
    }
    const Error error = channel.wait(request).error();
    EXPECT_EQ(channel.replays(), 0u);
    return error;
}

TYPED_TEST(ChannelRetry, AModelWithStateGetsNothingTwiceThoughItsChannelIsReopened) {
    FakeWorker first{dies_of(2)};
    FakeWorker second{[](FakeWorker& w) {
        w.greet();
        EXPECT_EQ(w.receive(), std::nullopt);
    }};
    FakeDaemon daemon{introducing({&first, &second}, true)};
    TypeParam channel = opened<TypeParam>(daemon);
    const Input x = filled(channel, {});
    const std::uint64_t one = channel.submit(retry_safe(only(x))).value();
    const std::uint64_t other = channel.submit(retry_safe(only(x))).value();
    EXPECT_EQ(channel.wait(one).error().code, ErrorCode::worker_lost);
    ASSERT_TRUE(channel.reopen());
    EXPECT_EQ(channel.wait(other).error().code, ErrorCode::worker_lost);
}

TYPED_TEST(ChannelRetry, ACancelledRequestIsNotSentAgainWithTheOthers) {
    FakeWorker first{[](FakeWorker& w) {
        w.greet();
        w.expect<channel::Infer>();
        w.expect<channel::Infer>();
        w.expect<channel::Cancel>();
    }};
    FakeWorker second{answers_only(2)};
    FakeDaemon daemon{introducing({&first, &second})};
    TypeParam channel = opened<TypeParam>(daemon);
    const std::uint64_t cancelled = channel.submit(retry_safe(only(filled(channel, {1})))).value();
    const std::uint64_t other = channel.submit(retry_safe(only(filled(channel, {2})))).value();
    ASSERT_TRUE(channel.cancel(cancelled));

    EXPECT_TRUE(channel.wait(other));
    EXPECT_EQ(channel.wait(cancelled).error().code, ErrorCode::worker_lost);
}

TYPED_TEST(ChannelRetry, WhatIsNeverSentAgain) {
    const auto worker_that = [](const std::function<void(FakeWorker&)>& goes_on) {
        return [goes_on](FakeWorker& w) {
            die_of_it(w);
            goes_on(w);
        };
    };
    const auto unloaded = worker_that(
        [](FakeWorker& w) { w.send(channel::encode(channel::Closing{ErrorCode::worker_draining, 1000ms})); });
    const auto broken = worker_that([](FakeWorker& w) {
        w.send(channel::encode(channel::Failure{0, {ErrorCode::protocol_violation, "17 faults", ""}}));
    });
    const auto cancelled = worker_that([](FakeWorker& w) { w.expect<channel::Cancel>(); });
    EXPECT_EQ(never_sent_again<TypeParam>(die_of_it, true).code, ErrorCode::worker_lost) << "to a model with state";
    EXPECT_EQ(never_sent_again<TypeParam>(cancelled, false, true).code, ErrorCode::worker_lost);
    EXPECT_EQ(never_sent_again<TypeParam>(unloaded).code, ErrorCode::worker_lost);
    EXPECT_EQ(never_sent_again<TypeParam>(broken).code, ErrorCode::protocol_violation) << "the worker lives";

    const Error error = never_sent_again<TypeParam>(die_of_it);
    EXPECT_EQ(error.code, ErrorCode::not_running) << "without a daemon";
    EXPECT_THAT(error.attempt, HasSubstr("request 1 (forward): fake is gone: its process has ended; sending it once "
                                         "more: "));
    EXPECT_THAT(error.attempt, HasSubstr("connecting to"));
}

TYPED_TEST(ChannelRetry, AnAdoptedChannelSaysThatItCannotBeReopened) {
    FakeWorker worker{die_of_it};
    TypeParam channel = adopt<TypeParam>(worker).value();
    const Input x = filled(channel, {});

    EXPECT_EQ(channel.infer(retry_safe(only(x))).error().code, ErrorCode::worker_lost);
    const Error error = channel.reopen().error();
    EXPECT_EQ(error.code, ErrorCode::worker_lost);
    EXPECT_THAT(error.attempt, HasSubstr("it came as a descriptor"));
}

TEST(ChannelDeadline, TheLoadOfTheNextWorkerCountsToTheDeadline) {
    FakeWorker first{die_of_it};
    FakeDaemon daemon{[&](FakeDaemon& d) {
        introduce(d, first);
        const auto again = d.next_request("channel.open");
        const std::int64_t left = again.at("params").at("deadline_ms").as_int64();
        EXPECT_GT(left, 0);
        EXPECT_LE(left, 50);
        d.refuse(again, {ErrorCode::deadline_exceeded, "loading fake: not ready within 50 ms", "wait longer"});
    }};
    Channel channel = opened<Channel>(daemon);
    const Input x = filled(channel, {});

    const Error error = channel.infer(retry_safe(only(x), 50ms)).error();

    EXPECT_EQ(error.code, ErrorCode::deadline_exceeded);
    EXPECT_THAT(error.attempt, HasSubstr("sending it once more: loading fake: not ready within 50 ms"));
}

TYPED_TEST(ChannelRetry, TheNextWorkerGetsWhatTheLoadLeftOfTheDeadline) {
    FakeWorker first{[](FakeWorker& w) { w.greet(); }};
    FakeWorker second{[](FakeWorker& w) {
        w.greet();
        const auto request = w.expect<channel::Infer>();
        EXPECT_LE(request.deadline, 20s - 50ms);
        w.answer(request.request_id, {});
    }};
    FakeDaemon daemon{[&](FakeDaemon& d) {
        introduce(d, first);
        introduce(d, second, false, 50ms);
        d.await_hang_up();
    }};
    TypeParam channel = opened<TypeParam>(daemon);
    first.finish();
    const Input x = filled(channel, {});

    EXPECT_TRUE(channel.infer(retry_safe(only(x), 20s)));
}

TYPED_TEST(ChannelRetry, ARequestWhoseDeadlinePassedDuringTheLoadIsNotSentWithTheOthers) {
    FakeWorker first{dies_of(2)};
    FakeWorker second{answers_only(1)};
    FakeDaemon daemon{introducing({&first, &second})};
    TypeParam channel = opened<TypeParam>(daemon);
    const std::uint64_t patient = channel.submit(retry_safe(only(filled(channel, {1})))).value();
    const std::uint64_t hasty = channel.submit(retry_safe(only(filled(channel, {2})), 1ms)).value();
    const auto passed = std::chrono::steady_clock::now() + 1ms;
    while (std::chrono::steady_clock::now() < passed) std::this_thread::yield();

    EXPECT_TRUE(channel.wait(patient));
    const Error error = channel.wait(hasty).error();
    EXPECT_EQ(error.code, ErrorCode::deadline_exceeded);
    EXPECT_THAT(error.attempt, HasSubstr("request 2 of fake, lost with generation 3"));
}

TEST(ChannelDeadline, AWorkerThatNeverWelcomesIsNotWaitedForBeyondTheDeadline) {
    FakeWorker first{die_of_it};
    FakeWorker mute{[](FakeWorker& w) { w.await_hang_up(); }};
    FakeDaemon daemon{introducing({&first, &mute})};
    Channel channel = opened<Channel>(daemon);
    const Input x = filled(channel, {});

    EXPECT_EQ(channel.infer(retry_safe(only(x), 20ms)).error().code, ErrorCode::deadline_exceeded);
}

TYPED_TEST(ChannelRetry, AWorkerThatIsDeadWhenItIsIntroducedIsAskedForOnceMore) {
    FakeWorker first{die_of_it}, dead{[](FakeWorker&) {}};
    FakeWorker third{answers_all};
    FakeDaemon daemon{[&](FakeDaemon& d) {
        introduce(d, first);
        // The asynchronous client asks for all requests that wait, and so without the
        // deadline of one.
        constexpr bool has_deadline = std::is_same_v<TypeParam, Channel>;
        const auto left = [](const boost::json::object& asked) {
            return has_deadline ? asked.at("params").at("deadline_ms").as_int64() : 0;
        };
        const auto asked = d.next_request("channel.open");
        const auto asked_at = std::chrono::steady_clock::now();
        while (std::chrono::steady_clock::now() < asked_at + 1ms) std::this_thread::yield();
        introduce_to(asked, d, dead);
        const auto again = d.next_request("channel.open");
        EXPECT_EQ(left(again) < left(asked), has_deadline) << "the first worker took of the request's deadline";
        introduce_to(again, d, third);
        d.await_hang_up();
    }};
    TypeParam channel = opened<TypeParam>(daemon);
    const Input x = filled(channel, {});

    EXPECT_TRUE(channel.infer(retry_safe(only(x), 20s)));
}

TYPED_TEST(ChannelRetry, AWorkerThatDiedBetweenTwoRequestsIsReplacedByARetrySafeOne) {
    FakeWorker first{[](FakeWorker& w) { w.greet(); }};
    FakeWorker second{answers_all};
    FakeDaemon daemon{introducing({&first, &second})};
    TypeParam channel = opened<TypeParam>(daemon);
    first.finish();
    const Input x = filled(channel, {});

    EXPECT_EQ(channel.submit({.inputs = only(x)}).error().code, ErrorCode::worker_lost);
    EXPECT_TRUE(channel.infer(retry_safe(only(x))));
    EXPECT_EQ(channel.replays(), 0u) << "it had not been sent";
}

TYPED_TEST(ChannelRetry, NothingIsLeftOfTheDeadWorkerOnceItsTensorsAreDropped) {
    const std::size_t descriptors = open_descriptors();
    {
        FakeWorker first{die_of_it};
        FakeWorker second{answers_all};
        FakeDaemon daemon{introducing({&first, &second})};
        {
            TypeParam channel = opened<TypeParam>(daemon);
            EXPECT_TRUE(channel.infer(retry_safe(only(filled(channel, {})))));
            first.finish();
            EXPECT_EQ(mappings("/memfd:fake"), 6u) << "two of the client, and of each worker in this process two";
        }
    }
    EXPECT_EQ(open_descriptors(), descriptors);
}

}  // namespace
}  // namespace bulkhead

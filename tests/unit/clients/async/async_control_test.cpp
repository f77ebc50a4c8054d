/// The control socket with an Asio loop: tokens, many calls at a time, cancellation, and
/// supervisors that die.

#include <future>

#include <boost/asio/bind_cancellation_slot.hpp>
#include <boost/asio/cancellation_signal.hpp>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/deferred.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <boost/asio/use_future.hpp>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "bulkhead/async_control.h"
#include "tests/support/clients/fake_daemon.h"
#include "tests/support/clients/fake_worker.h"
#include "tests/unit/clients/both_controls.h"

namespace bulkhead {
namespace {

namespace asio = boost::asio;
namespace json = boost::json;
using namespace std::chrono_literals;
using namespace test;
using testing::HasSubstr;

void run_while(asio::io_context& loop, const auto& waits) {
    while (waits() && loop.run_one() > 0) continue;
}

TEST(AsyncControl, EveryKindOfTokenGetsTheAnswer) {
    FakeDaemon daemon{[](FakeDaemon& d) {
        for (int i = 1; i <= 4; ++i) {
            const auto asked = d.request("model.why");
            EXPECT_EQ(asked.at("params").at("model"), "m");
            d.answer(asked, i);
        }
    }};
    asio::io_context loop;
    AsyncControl control{loop.get_executor(), daemon.path()};
    const json::object params{{"model", "m"}};

    int called = 0;
    control.async_call("model.why", params, [&](Result<Answer> answer) { called = answer.value().result.as_int64(); });
    EXPECT_EQ(called, 0) << "never from within the function that starts it";
    loop.run();
    EXPECT_EQ(called, 1);

    std::future<Result<Answer>> future = control.async_call("model.why", params, asio::use_future);
    loop.restart(), loop.run();
    EXPECT_EQ(future.get().value().result, 2);

    auto deferred = control.async_call("model.why", params, asio::deferred);
    std::move(deferred)([&](Result<Answer> answer) { called = answer.value().result.as_int64(); });
    loop.restart(), loop.run();
    EXPECT_EQ(called, 3);

    asio::co_spawn(
        loop,
        [&]() -> asio::awaitable<void> {
            const Result<Answer> answer = co_await control.async_call("model.why", params, asio::use_awaitable);
            called = answer.value().result.as_int64();
        },
        asio::detached);
    loop.restart(), loop.run();
    EXPECT_EQ(called, 4);
}

TEST(AsyncControl, AnswersOfSeveralCallsMayComeInAnyOrderAndBringTheirDescriptors) {
    FakeDaemon daemon{[](FakeDaemon& d) {
        const auto first = d.request("a"), second = d.request("channel.open"), third = d.request("c");
        d.answer(third, 3);
        const PacketPair pair = PacketPair::make().value();
        const std::array<int, 1> fds{pair.second.get()};
        d.answer(second, {{"fds", 1}}, fds);
        d.refuse(first, {ErrorCode::model_unknown, "looking for a", "name another"});
        d.await_hang_up();
    }};
    asio::io_context loop;
    AsyncControl control{loop.get_executor(), daemon.path()};
    std::vector<std::string> order;
    control.async_call("a", {}, [&](Result<Answer> answer) {
        order.push_back("a");
        EXPECT_EQ(answer.error(), (Error{ErrorCode::model_unknown, "looking for a", "name another"}));
    });
    control.async_call("channel.open", {}, [&](Result<Answer> answer) {
        order.push_back("b");
        EXPECT_EQ(answer.value().fds.size(), 1u);
    });
    control.async_call("c", {}, [&](Result<Answer>) { order.push_back("c"); });
    run_while(loop, [&] { return order.size() < 3; });

    EXPECT_THAT(order, testing::ElementsAre("c", "b", "a"));
}

TEST(AsyncControl, ACallIsCancelledByItsSlotAndItsLateAnswerHurtsNobody) {
    Gate cancelled;
    FakeDaemon daemon{[&](FakeDaemon& d) {
        const auto first = d.request("channel.open"), second = d.request("b");
        cancelled.wait();
        const PacketPair pair = PacketPair::make().value();
        const std::array<int, 1> fds{pair.second.get()};
        d.answer(first, {{"fds", 1}}, fds);
        d.answer(second, 2);
        d.await_hang_up();
    }};
    const std::size_t before = open_descriptors();
    {
        asio::io_context loop;
        AsyncControl control{loop.get_executor(), daemon.path()};
        asio::cancellation_signal signal;
        std::optional<Error> ended;
        std::optional<Answer> other;
        control.async_call("channel.open", {}, asio::bind_cancellation_slot(signal.slot(), [&](Result<Answer> answer) {
                               ended = answer.error();
                               cancelled.open();
                           }));
        control.async_call("b", {}, [&](Result<Answer> answer) { other = std::move(answer).value(); });
        loop.poll();
        ASSERT_FALSE(ended);

        signal.emit(asio::cancellation_type::total);

        run_while(loop, [&] { return !other; });
        ASSERT_TRUE(ended);
        EXPECT_EQ(ended->code, ErrorCode::cancelled);
        ASSERT_TRUE(other);
        EXPECT_EQ(other->result, 2);
    }
    daemon.finish();
    EXPECT_LE(open_descriptors(), before) << "the descriptor of the answer that nobody waits for is closed";
}

TEST(AsyncControl, WhatIsUnderWayWhenItIsDroppedEndsWithCancelled) {
    FakeDaemon daemon{[](FakeDaemon& d) {
        d.request("a");
        d.await_hang_up();
    }};
    asio::io_context loop;
    auto control = std::make_unique<AsyncControl>(loop.get_executor(), daemon.path());
    std::optional<Error> ended;
    control->async_call("a", {}, [&](Result<Answer> answer) { ended = answer.error(); });
    loop.poll();
    control.reset();
    loop.restart(), loop.run();  // and the loop runs dry
    ASSERT_TRUE(ended);
    EXPECT_EQ(ended->code, ErrorCode::cancelled);
}

TEST(AsyncControl, ALoopThatIsDestroyedWithCallsUnderWayLeavesNothing) {
    const std::size_t before = open_descriptors();
    {
        FakeDaemon daemon{[](FakeDaemon& d) {
            d.request("a");
            d.await_hang_up();
        }};
        {
            auto loop = std::make_unique<asio::io_context>();
            AsyncControl control{loop->get_executor(), daemon.path()};
            control.async_call("a", {}, [](Result<Answer>) { ADD_FAILURE() << "nobody ran the loop"; });
            control.async_next_event({}, [](Result<json::object>) { ADD_FAILURE(); });
            loop->poll();
            AsyncControl gone = std::move(control);
        }
        daemon.finish();
    }
    EXPECT_EQ(open_descriptors(), before);
}

TEST(AsyncControl, SupervisorsMayDieUnderSeveralCallsAtOnce) {
    FakeDaemon daemon{[](FakeDaemon& d) {
        d.request("model.load");
        d.request("fleet.status");
        d.request("daemon.upgrade");
        d.next_connection();  // dies before the ping
        d.next_connection();
        d.pong();
        // In any order: both go on as soon as the connection stands.
        for (int i = 0; i < 2; ++i) {
            const auto asked = d.request();
            const bool load = asked.at("method") == "model.load";
            if (load) {
                EXPECT_TRUE(asked.at("params").at("again").as_bool());
                EXPECT_LE(asked.at("params").at("deadline_ms").as_int64(), 60'000);
            } else {
                EXPECT_EQ(asked.at("method"), "fleet.status");
                EXPECT_FALSE(asked.contains("params")) << "it only looks";
            }
            d.answer(asked, load ? 1 : 2);
        }
        d.await_hang_up();
    }};
    asio::io_context loop;
    AsyncControl control{loop.get_executor(), daemon.path()};
    int done = 0;
    control.async_call("model.load", {{"model", "m"}, {"deadline_ms", 60'000}}, [&](Result<Answer> answer) {
        EXPECT_EQ(answer.value().result, 1);
        ++done;
    });
    control.async_call("fleet.status", {}, [&](Result<Answer> answer) {
        EXPECT_EQ(answer.value().result, 2);
        ++done;
    });
    control.async_call("daemon.upgrade", {}, [&](Result<Answer> answer) {
        EXPECT_EQ(answer.error().code, ErrorCode::not_running);
        EXPECT_THAT(answer.error().attempt, HasSubstr("whether it was done is not known"));
        ++done;
    });
    run_while(loop, [&] { return done < 3; });
    EXPECT_EQ(done, 3);
}

TEST(AsyncControl, ADeadlineEndsACallAndNotTheConnection) {
    FakeDaemon daemon{[](FakeDaemon& d) {
        d.request("a");
        d.answer(d.request("b"), 2);
        d.await_hang_up();
    }};
    SteppedControl control{daemon.path()};
    EXPECT_EQ(control.call("a", {}, 1ms).error().code, ErrorCode::deadline_exceeded);
    EXPECT_EQ(control.call("b").value().result, 2);
}

TEST(AsyncControl, AConnectionThatIsOneTooManyIsTheErrorOfEveryCallOnIt) {
    FakeDaemon daemon{[](FakeDaemon& d) {
        const Error full{ErrorCode::resources_exhausted, "1024 connections", "close one"};
        d.request("a"), d.request("b");
        d.refuse({{"id", nullptr}}, full);
        d.await_hang_up();
    }};
    asio::io_context loop;
    AsyncControl control{loop.get_executor(), daemon.path()};
    int refused = 0;
    for (const char* method : {"a", "b"})
        control.async_call(method, {}, [&](Result<Answer> answer) {
            EXPECT_EQ(answer.error().code, ErrorCode::resources_exhausted);
            ++refused;
        });
    run_while(loop, [&] { return refused < 2; });
    EXPECT_EQ(refused, 2);
}

TEST(AsyncControl, ALineThatTheSocketTakesInPiecesArrivesWhole) {
    const std::string large(60'000, 'x');
    constexpr int calls = 20;  // far more than a socket holds
    FakeDaemon daemon{[&](FakeDaemon& d) {
        for (int i = 0; i < calls; ++i) {
            const auto asked = d.request("model.why");
            EXPECT_EQ(asked.at("params").at("model").as_string().size(), large.size());
            d.answer(asked, i);
        }
        d.await_hang_up();
    }};
    asio::io_context loop;
    AsyncControl control{loop.get_executor(), daemon.path()};
    int answered = 0;
    for (int i = 0; i < calls; ++i)
        control.async_call("model.why", {{"model", large}}, [&, i](Result<Answer> answer) {
            EXPECT_EQ(answer.value().result, i);
            ++answered;
        });
    std::optional<Error> too_long;
    control.async_call("model.why", {{"model", large + large}},
                       [&](Result<Answer> answer) { too_long = answer.error(); });
    run_while(loop, [&] { return (answered < calls || !too_long); });
    EXPECT_EQ(answered, calls);
    EXPECT_EQ(too_long->code, ErrorCode::input_invalid);
}

TEST(AsyncControl, AReaderOfEventsThatWaitsMayBeCancelled) {
    FakeDaemon daemon{[](FakeDaemon& d) {
        d.answer(d.request("events.subscribe"), {{"subscribed", true}});
        d.request("go");
        d.send(event_line(1));
        d.await_hang_up();
    }};
    asio::io_context loop;
    AsyncControl control{loop.get_executor(), daemon.path()};
    asio::cancellation_signal signal;
    std::optional<Error> ended;
    control.async_next_event(
        {}, asio::bind_cancellation_slot(signal.slot(), [&](Result<json::object> event) { ended = event.error(); }));
    loop.poll();
    signal.emit(asio::cancellation_type::terminal);
    run_while(loop, [&] { return !ended; });
    EXPECT_EQ(ended->code, ErrorCode::cancelled);

    control.async_call("go", {}, [](Result<Answer>) {});
    std::optional<Result<json::object>> event;
    control.async_next_event({}, [&](Result<json::object> next) { event = std::move(next); });
    run_while(loop, [&] { return !event; });
    EXPECT_EQ(event->value().at("number"), 1) << "subscribed once, though nobody waited for it";
}

}  // namespace
}  // namespace bulkhead

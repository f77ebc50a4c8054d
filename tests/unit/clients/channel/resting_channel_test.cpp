/// A channel that nobody uses for a while still gives back what its worker, and others, may want.

#include <atomic>
#include <list>

#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/io_context.hpp>
#include <gtest/gtest.h>

#include "bulkhead/async_channel.h"
#include "clients/cpp/base/limits.h"
#include "clients/cpp/base/wait_ready.h"
#include "tests/support/clients/channel_calls.h"
#include "tests/support/clients/loop.h"
#include "tests/support/mappings.h"

namespace bulkhead {
namespace {

namespace asio = boost::asio;
using namespace std::chrono_literals;
using namespace test;

constexpr std::array<std::int64_t, 1> half{FakeWorker::slab_bytes / 2};
constexpr std::array<std::int64_t, 1> more_than_is_left{FakeWorker::slab_bytes / 2 + 1};

void greet(FakeWorker& w) {
    w.welcome.features = wire::feature_returning | wire::feature_lending;
    w.greet();
}

/// For the slab_request of an input that the first slab has no room for.
void grow(FakeWorker& w, std::uint32_t id) {
    const auto request = w.expect<channel::SlabRequest>();
    w.offer(id, wire::SlabDirection::input, request.size_bytes, request.request_id);
}

class AsyncChannelAtRest : public testing::Test {
protected:
    AsyncChannel adopt(FakeWorker& worker) {
        return loop.adopt(worker, {.client = "test", .deadline = 10s, .slab_idle = 10ms}).value();
    }
    Input allocate(AsyncChannel& channel, std::int64_t bytes) {
        return loop.allocate(channel, wire::DType::uint8, {bytes}).value();
    }
    Result<Reply> infer(AsyncChannel& channel) { return loop.infer(channel, {}); }
    /// The loop has other things to do until the worker has had what it waits for, or has given up.
    void run_until_the_script_ends(AsyncChannel& channel) { run_until(ended, channel); }
    void run_until(const std::atomic<bool>& done, AsyncChannel& channel) {
        const auto until = Clock::now() + patience;
        while (!done && Clock::now() < until) loop.context.run_one_for(20ms);
        if (done) return;
        ADD_FAILURE() << "the worker waits in vain";
        channel = {};  // which it hears of
        loop.context.run_for(20ms);
    }

    Loop loop;
    asio::executor_work_guard<asio::io_context::executor_type> work{loop.context.get_executor()};
    std::atomic<bool> ended = false;
};

TEST_F(AsyncChannelAtRest, GivesBackAnInputSlabThatWasDroppedLongAfterTheLastRequest) {
    FakeWorker worker{[&](FakeWorker& w) {
        greet(w);
        grow(w, 2);
        w.answer(w.expect<channel::Infer>().request_id, {});
        EXPECT_EQ(w.expect<channel::SlabReturn>().slab_id, 2U);
        ended = true;
    }};
    AsyncChannel channel = adopt(worker);
    const Input first = allocate(channel, half[0]);
    std::optional<Input> added{allocate(channel, more_than_is_left[0])};
    ASSERT_TRUE(infer(channel));
    loop.context.run_for(3 * limits::rest);  // it has come to rest
    added.reset();

    run_until_the_script_ends(channel);
}

TEST_F(AsyncChannelAtRest, HearsAWithdrawalThoughHandshakesBlockAllThreadsThatMayBeBlocked) {
    Gate rests, heard;
    std::atomic<std::size_t> greeted = 0;
    FakeWorker worker{[&](FakeWorker& w) {
        greet(w);
        rests.wait();
        w.send(channel::encode(channel::SlabWithdraw{1}));
        EXPECT_EQ(w.expect<channel::SlabReturn>().slab_id, 1U);
        ended = true;
    }};
    const auto says_nothing = [&](FakeWorker& w) {
        w.expect<channel::Hello>();
        ++greeted;
        heard.wait();
    };
    AsyncChannel channel = adopt(worker);
    loop.context.run_for(3 * limits::rest);
    std::list<FakeWorker> silent;
    std::size_t refused = 0;
    for (std::size_t i = 0; i < limits::blocking_threads; ++i)
        AsyncChannel::async_adopt(loop.context.get_executor(), silent.emplace_back(says_nothing).client_end(),
                                  {.client = "test", .deadline = 20s},
                                  [&](const Result<AsyncChannel>& opened) { refused += !opened; });
    while (greeted < limits::blocking_threads) loop.context.run_one_for(20ms);
    rests.open();

    run_until_the_script_ends(channel);
    EXPECT_EQ(refused, 0U) << "or nothing was blocked";
    heard.open();
    while (refused < limits::blocking_threads) loop.context.run_one();
}

TEST_F(AsyncChannelAtRest, AWithdrawalThatCrossesAReturnIsAnsweredByItOnce) {
    Gate again;
    FakeWorker worker{[&](FakeWorker& w) {
        greet(w);
        grow(w, 2);
        EXPECT_EQ(w.expect<channel::SlabReturn>().slab_id, 2U);
        w.send(channel::encode(channel::SlabWithdraw{2}));  // as from a worker that has
                                                            // not read that yet
        w.answer(w.expect<channel::Infer>().request_id, {});
        ended = true;
        again.wait();
        w.send(channel::encode(channel::SlabWithdraw{2}));
        w.await_hang_up();
    }};
    AsyncChannel channel = adopt(worker);
    std::optional<Input> first{allocate(channel, half[0])};
    static_cast<void>(allocate(channel, more_than_is_left[0]));
    loop.context.run_for(3 * limits::rest);

    const Result<Reply> reply = infer(channel);
    EXPECT_TRUE(reply) << reply.error().text();
    run_until_the_script_ends(channel);
    again.open();
    const Result<Reply> second = infer(channel);
    ASSERT_FALSE(second);
    EXPECT_EQ(second.error().code, ErrorCode::protocol_violation) << "no slab is withdrawn twice";
}

TEST_F(AsyncChannelAtRest, GivesBackAnAddedSlabAlsoWhereTheFirstWasWithdrawn) {
    Gate rests;
    std::atomic<bool> first_returned = false;
    FakeWorker worker{[&](FakeWorker& w) {
        greet(w);
        grow(w, 2);
        rests.wait();
        w.send(channel::encode(channel::SlabWithdraw{0}));
        EXPECT_EQ(w.expect<channel::SlabReturn>().slab_id, 0U);
        first_returned = true;
        EXPECT_EQ(w.expect<channel::SlabReturn>().slab_id, 2U);
        ended = true;
    }};
    AsyncChannel channel = adopt(worker);
    std::optional<Input> first{allocate(channel, half[0])};
    std::optional<Input> added{allocate(channel, more_than_is_left[0])};
    first.reset();
    rests.open();
    run_until(first_returned, channel);
    added.reset();

    run_until_the_script_ends(channel);
}

/// Of the fake worker's slabs and rings, in this process.
std::size_t mappings_of_worker() { return mappings("/memfd:fake") + mappings("/memfd:test-rings"); }

TEST_F(AsyncChannelAtRest, KeepsNothingOfAWorkerThatWasUnloaded) {
    Gate opened;
    FakeWorker worker{[&](FakeWorker& w) {
        greet(w);
        opened.wait();
        w.send(channel::encode(channel::Closing{ErrorCode::worker_draining, {}}));
        w.slabs.clear();  // what is mapped then is the client's
    }};
    AsyncChannel channel = adopt(worker);
    opened.open();
    worker.finish();
    EXPECT_EQ(mappings_of_worker(), over_rings() ? 3U : 2U);
    const auto until = Clock::now() + patience;
    while (mappings_of_worker() > 0 && Clock::now() < until) loop.context.run_one_for(20ms);

    EXPECT_EQ(mappings_of_worker(), 0U);
}

TEST_F(AsyncChannelAtRest, ReleasesAResultWhenItIsDropped) {
    FakeWorker worker{[&](FakeWorker& w) {
        greet(w);
        w.answer(w.expect<channel::Infer>().request_id, {w.output("p", {1})});
        EXPECT_EQ(w.expect<channel::Release>().leases.size(), 1U);
        ended = true;
    }};
    AsyncChannel channel = adopt(worker);
    std::optional<Reply> reply = infer(channel).value();
    loop.context.run_for(3 * limits::rest);
    reply.reset();

    run_until_the_script_ends(channel);
}

TEST_F(AsyncChannelAtRest, IsNoWorkOfItsLoop) {
    FakeWorker worker{[](FakeWorker& w) {
        greet(w);
        w.answer(w.expect<channel::Infer>().request_id, {});
        w.await_hang_up();
    }};
    AsyncChannel channel = adopt(worker);
    ASSERT_TRUE(infer(channel));
    work.reset();
    loop.context.restart();
    loop.context.run();  // and comes back
    EXPECT_EQ(channel.model(), "fake");
}

TEST_F(AsyncChannelAtRest, AnEndThatCameMeanwhileIsNewsToTheNextRequestAlone) {
    FakeWorker worker{[&](FakeWorker& w) { greet(w); }};
    AsyncChannel channel = adopt(worker);
    worker.finish();
    loop.context.run_for(2 * limits::rest);
    EXPECT_EQ(infer(channel).error().code, ErrorCode::worker_lost);
}

TEST(ChannelAtRest, ReceiveGivesBackWhatIsIdleAndReleasesAtOnceFromThenOn) {
    Gate dropped;
    std::atomic<bool> ended = false;
    FakeWorker worker{[&](FakeWorker& w) {
        greet(w);
        grow(w, 2);
        w.answer(w.expect<channel::Infer>().request_id, {});
        const auto request = w.expect<channel::Infer>();
        EXPECT_EQ(request.tensors.at(0).lease.slab_id, 2U) << "it was not idle";
        w.answer(request.request_id, {w.output("p", {1})});
        EXPECT_EQ(w.expect<channel::SlabReturn>().slab_id, 2U);
        dropped.wait();
        EXPECT_EQ(w.expect<channel::Release>().leases.size(), 1U);
        ended = true;
    }};
    Channel channel =
        Channel::adopt(worker.client_end(), {.client = "test", .deadline = 10s, .slab_idle = {}}).value();
    const Input first = channel.allocate(wire::DType::uint8, half).value();
    std::optional<Input> added{channel.allocate(wire::DType::uint8, more_than_is_left).value()};
    ASSERT_TRUE(channel.infer({}));
    std::optional<Reply> reply = infer(channel, *added).value();
    added.reset();

    EXPECT_TRUE(channel.receive());
    reply.reset();
    dropped.open();
    worker.finish();
    EXPECT_TRUE(ended);
}

}  // namespace
}  // namespace bulkhead

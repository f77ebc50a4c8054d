/// A channel that nobody uses for a while still gives back what its worker, and others, may want.

#include <atomic>

#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/io_context.hpp>
#include <gtest/gtest.h>
#include <poll.h>

#include "clients/cpp/async_channel.h"
#include "clients/cpp/limits.h"
#include "tests/unit/clients/channel_calls.h"

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
    template <typename T>
    Result<T> until(std::optional<Result<T>>& outcome) {
        while (!outcome && loop.run_one() > 0) {
        }
        return std::move(*outcome);
    }
    AsyncChannel adopt(FakeWorker& worker) {
        std::optional<Result<AsyncChannel>> outcome;
        AsyncChannel::async_adopt(loop.get_executor(), worker.client_end(),
                                  {.client = "test", .deadline = 10s, .slab_idle = 10ms},
                                  [&](Result<AsyncChannel> opened) { outcome = std::move(opened); });
        return until(outcome).value();
    }
    Input allocate(AsyncChannel& channel, std::int64_t bytes) {
        std::optional<Result<Input>> outcome;
        channel.async_allocate(wire::DType::uint8, {bytes}, [&](Result<Input> input) { outcome = std::move(input); });
        return until(outcome).value();
    }
    Result<Reply> infer(AsyncChannel& channel) {
        std::optional<Result<Reply>> outcome;
        channel.async_infer({}, [&](Result<Reply> reply) { outcome = std::move(reply); });
        return until(outcome);
    }
    /// The loop has other things to do until the worker has had what it waits for, or has given up.
    void run_until_the_script_ends() {
        while (!ended) loop.run_one_for(20ms);
    }

    asio::io_context loop;
    asio::executor_work_guard<asio::io_context::executor_type> work{loop.get_executor()};
    std::atomic<bool> ended = false;
};

TEST_F(AsyncChannelAtRest, GivesBackAnInputSlabThatABurstHasLeftEmpty) {
    FakeWorker worker{[&](FakeWorker& w) {
        greet(w);
        grow(w, 2);
        EXPECT_EQ(w.expect<channel::SlabReturn>().slab_id, 2U);
        ended = true;
    }};
    AsyncChannel channel = adopt(worker);
    const Input first = allocate(channel, half[0]);
    static_cast<void>(allocate(channel, more_than_is_left[0]));  // dropped, and nothing is asked of the channel any more

    run_until_the_script_ends();
}

TEST_F(AsyncChannelAtRest, GivesItBackAlsoWhereItWasDroppedLongAfterTheLastRequest) {
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
    loop.run_for(3 * limits::rest);  // it has come to rest
    added.reset();

    run_until_the_script_ends();
}

TEST_F(AsyncChannelAtRest, HearsAWithdrawal) {
    Gate rests;
    FakeWorker worker{[&](FakeWorker& w) {
        greet(w);
        w.answer(w.expect<channel::Infer>().request_id, {});
        rests.wait();
        w.send(channel::encode(channel::SlabWithdraw{1}));
        EXPECT_EQ(w.expect<channel::SlabReturn>().slab_id, 1U);
        ended = true;
    }};
    AsyncChannel channel = adopt(worker);
    ASSERT_TRUE(infer(channel));
    loop.run_for(3 * limits::rest);
    rests.open();

    run_until_the_script_ends();
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
    loop.run_for(3 * limits::rest);
    reply.reset();

    run_until_the_script_ends();
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
    loop.restart();
    loop.run();  // and comes back
    EXPECT_EQ(channel.model(), "fake");
}

TEST_F(AsyncChannelAtRest, AnEndThatCameMeanwhileIsNewsToTheNextRequestAlone) {
    FakeWorker worker{[&](FakeWorker& w) { greet(w); }};
    AsyncChannel channel = adopt(worker);
    worker.finish();
    loop.run_for(2 * limits::rest);
    EXPECT_EQ(infer(channel).error().code, ErrorCode::worker_lost);
}

TEST(ChannelAtRest, ReceiveGivesBackWhatIsIdleAndReleasesAtOnceFromThenOn) {
    Gate dropped;
    std::atomic<bool> ended = false;
    FakeWorker worker{[&](FakeWorker& w) {
        greet(w);
        grow(w, 2);
        w.answer(w.expect<channel::Infer>().request_id, {w.output("p", {1})});
        EXPECT_EQ(w.expect<channel::SlabReturn>().slab_id, 2U);
        dropped.wait();
        EXPECT_EQ(w.expect<channel::Release>().leases.size(), 1U);
        ended = true;
    }};
    Channel channel =
        Channel::adopt(worker.client_end(), {.client = "test", .deadline = 10s, .slab_idle = {}}).value();
    const Input first = channel.allocate(wire::DType::uint8, half).value();
    std::optional<Input> added{channel.allocate(wire::DType::uint8, more_than_is_left).value()};
    std::optional<Reply> reply = channel.infer({}).value();
    added.reset();

    EXPECT_TRUE(channel.receive());
    reply.reset();
    dropped.open();
    worker.finish();
    EXPECT_TRUE(ended);
}

}  // namespace
}  // namespace bulkhead

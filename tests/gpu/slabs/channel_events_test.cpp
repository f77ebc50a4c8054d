/// Where a worker's stream stands among its waits for a client, which is another process here as ever, and what follows
/// when it stays there.

#include <array>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <vector>

#include <boost/asio/io_context.hpp>
#include <gmock/gmock.h>

#include "tests/gpu/slabs/cuda_peer.h"
#include "tests/gpu/slabs/on_gpu.h"
#include "worker/slabs/channel_events.h"
#include "worker/slabs/held_stream_watch.h"

namespace bulkhead::worker {
namespace {

using std::chrono::milliseconds;
using test::CudaPeer;

class WaitsForAClient : public test::OnGpu {
protected:
    void SetUp() override {
        OnGpu::SetUp();
        if (IsSkipped() || HasFatalFailure()) return;
        auto made = ChannelEvents::make(gpu);
        ASSERT_TRUE(made) << made.error().text();
        events = std::move(*made);
        ASSERT_EQ(client.ask("event import " + test::to_text(events->offers().at(event - 1).handle)), "ok");
    }
    [[nodiscard]] Result<> make_wait() const { return events->make_wait(stream, std::array{event}); }
    void await(const std::function<bool(const ChannelEvents::Held&)>& is_so) const {
        const auto until = std::chrono::steady_clock::now() + test::StreamGate::bound;
        for (ChannelEvents::Held held = events->held_at(); !is_so(held); held = events->held_at())
            ASSERT_LT(std::chrono::steady_clock::now(), until) << held.any << ' ' << held.wait;
    }

    /// Returns once the stream has passed: a process that ends before the GPU has reached its record holds it for good.
    void unblock(CudaPeer& peer) const {
        ASSERT_EQ(peer.ask("stream unblock"), "ok");
        await([](const auto& held) { return !held.any; });
    }

    static constexpr std::uint32_t event = limits::gpu_events + 1;  ///< the client's first
    CudaPeer client;
    std::shared_ptr<ChannelEvents> events;
};

TEST_F(WaitsForAClient, AStreamThatIsBusyBeforeAWaitIsToldFromOneThatStandsAtIt) {
    EXPECT_FALSE(events->held_at().any);
    ASSERT_EQ(client.ask("stream block"), "ok");
    ASSERT_EQ(client.ask("event record"), "ok");
    test::StreamGate gate;
    ASSERT_EQ(gate.hold(*gpu, stream), cuda::CUDA_SUCCESS);
    ASSERT_TRUE(make_wait());
    const ChannelEvents::Held busy = events->held_at();
    gate.let_pass();
    EXPECT_TRUE(busy.any);
    EXPECT_EQ(busy.wait, 0U) << "its own work is not done";

    await([](const auto& held) { return held.any && held.wait == 1; });
    unblock(client);
}

TEST_F(WaitsForAClient, MoreWaitsThanAreFollowedAreBehindThoseThatAre) {
    ASSERT_EQ(client.ask("stream block"), "ok");
    ASSERT_EQ(client.ask("event record"), "ok");
    for (std::size_t i = 0; i < 2 * limits::gpu_waits; ++i) ASSERT_TRUE(make_wait());
    await([](const auto& held) { return held.any && held.wait == 1; });
    unblock(client);

    ASSERT_TRUE(make_wait()) << "room is free again";
    await([](const auto& held) { return !held.any; });
    synchronize();
}

TEST_F(WaitsForAClient, ThatGoesWhileTheDriverHoldsAWaitUpLetPassBehindThat) {
    if (!test::is_fake_cuda()) GTEST_SKIP() << "only the fake driver keeps such a call on demand";
    constexpr std::uint32_t never_reached = event + 1;
    {
        CudaPeer dead;
        ASSERT_EQ(dead.ask("event import " + test::to_text(events->offers().at(never_reached - 1).handle)), "ok");
        ASSERT_EQ(dead.ask("stream block"), "ok");
        ASSERT_EQ(dead.ask("event record"), "ok");
        dead.kill();
    }
    ASSERT_EQ(client.ask("stream block"), "ok");
    ASSERT_EQ(client.ask("event record"), "ok");
    ::setenv("BULKHEAD_FAKE_CUDA_WAITS_BLOCK", "1", 1);
    auto queued = std::async(std::launch::async, [this] { return make_wait(); });
    await([](const auto& held) { return held.wait == ChannelEvents::Held::in_driver; });

    events->let_all_pass();

    EXPECT_EQ(events->held_at().wait, ChannelEvents::Held::in_driver) << "it waited for the driver";
    ASSERT_EQ(client.ask("stream unblock"), "ok");
    ASSERT_TRUE(queued.get());
    ::unsetenv("BULKHEAD_FAKE_CUDA_WAITS_BLOCK");
    ASSERT_TRUE(events->make_wait(stream, std::array{never_reached}));
    await([](const auto& held) { return !held.any; });
}

class AHeldStream : public WaitsForAClient {
protected:
    void client_goes(milliseconds deadline) {
        watch.emplace(io, deadline, [this](const Error& error) { stuck.push_back(error); });
        watch->add(events, "rosa");
    }
    /// Until the watch looks no more, and for less time than a held stream is held.
    void look() { io.run_for(test::StreamGate::bound / 2); }

    boost::asio::io_context io;
    std::optional<HeldStreamWatch> watch;
    std::vector<Error> stuck;
};

TEST_F(AHeldStream, IsToldOnceAndNamesTheClient) {
    ASSERT_EQ(client.ask("stream block"), "ok");
    ASSERT_EQ(client.ask("event record"), "ok");
    ASSERT_TRUE(make_wait());
    client_goes(milliseconds{20});
    EXPECT_TRUE(stuck.empty()) << "it has only just gone";
    look();

    ASSERT_EQ(stuck.size(), 1U);
    EXPECT_EQ(stuck[0].code, ErrorCode::deadline_exceeded);
    EXPECT_THAT(stuck[0].attempt, testing::HasSubstr("waits for an event of client \"rosa\""));
    unblock(client);
}

TEST_F(AHeldStream, IsToldToBeInTheDriverIfThatDoesNotReturn) {
    if (!test::is_fake_cuda()) GTEST_SKIP() << "only the fake driver keeps such a call on demand";
    ASSERT_EQ(client.ask("stream block"), "ok");
    ASSERT_EQ(client.ask("event record"), "ok");
    ::setenv("BULKHEAD_FAKE_CUDA_WAITS_BLOCK", "1", 1);
    auto queued = std::async(std::launch::async, [this] { return make_wait(); });
    await([](const auto& held) { return held.wait == ChannelEvents::Held::in_driver; });
    client_goes(milliseconds{20});
    look();

    EXPECT_EQ(stuck.size(), 1U);
    for (const Error& error : stuck) EXPECT_THAT(error.attempt, testing::HasSubstr("the driver has not returned"));
    ASSERT_EQ(client.ask("stream unblock"), "ok");
    EXPECT_TRUE(queued.get());
}

TEST_F(AHeldStream, IsNotOneThatIsBusyBeforeItsWait) {
    ASSERT_EQ(client.ask("event record"), "ok");
    test::StreamGate gate;
    ASSERT_EQ(gate.hold(*gpu, stream), cuda::CUDA_SUCCESS);
    ASSERT_TRUE(make_wait());
    client_goes(milliseconds{1});
    for (int looks = 0; looks < 20; ++looks) io.run_one();  // a millisecond from one to the next
    EXPECT_TRUE(stuck.empty());

    gate.let_pass();
    await([](const auto& held) { return !held.any; });
    const std::weak_ptr<const ChannelEvents> watched = events;
    events.reset();
    look();
    EXPECT_TRUE(stuck.empty());
    EXPECT_TRUE(watched.expired()) << "events that no stream waits for are freed";
}

TEST_F(AHeldStream, HasTheWholeDeadlineAtEachWait) {
    constexpr std::uint32_t second_event = event + 1;
    constexpr milliseconds deadline{20};
    CudaPeer second;
    ASSERT_EQ(second.ask("event import " + test::to_text(events->offers().at(second_event - 1).handle)), "ok");
    for (CudaPeer* peer : {&client, &second}) {
        ASSERT_EQ(peer->ask("stream block"), "ok");
        ASSERT_EQ(peer->ask("event record"), "ok");
    }
    ASSERT_TRUE(make_wait());
    ASSERT_TRUE(events->make_wait(stream, std::array{second_event}));
    await([](const auto& held) { return held.wait == 1; });
    client_goes(deadline);
    ASSERT_EQ(client.ask("stream unblock"), "ok");
    const Clock::time_point passed = Clock::now() + deadline;
    await([&](const auto& held) { return held.wait == 2 && Clock::now() >= passed; });
    watch->look_now();
    EXPECT_TRUE(stuck.empty()) << "the stream went on meanwhile";
    look();

    EXPECT_EQ(stuck.size(), 1U);
    unblock(second);
}

}  // namespace
}  // namespace bulkhead::worker

/// Where a worker's stream stands among its waits for a client, which is another process here as ever.

#include <array>
#include <chrono>
#include <functional>

#include <gtest/gtest.h>

#include "tests/gpu/slabs/cuda_peer.h"
#include "tests/gpu/slabs/on_gpu.h"
#include "worker/slabs/channel_events.h"

namespace bulkhead::worker {
namespace {

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
        const auto until = std::chrono::steady_clock::now() + std::chrono::seconds{60};
        while (!is_so(events->held_at())) ASSERT_LT(std::chrono::steady_clock::now(), until);
    }

    static constexpr std::uint32_t event = limits::gpu_events + 1;  ///< the client's first
    CudaPeer client;
    std::unique_ptr<ChannelEvents> events;
};

TEST_F(WaitsForAClient, AStreamThatIsBusyBeforeAWaitIsToldFromOneThatStandsAtIt) {
    EXPECT_FALSE(events->held_at().any);
    ASSERT_EQ(client.ask("stream block"), "ok");
    ASSERT_EQ(client.ask("event record"), "ok");
    test::StreamGate gate;
    {
        const cuda::Gpu::Current current{*gpu};
        ASSERT_EQ(gpu->driver().cuLaunchHostFunc(stream, test::StreamGate::pass, &gate), cuda::CUDA_SUCCESS);
    }
    ASSERT_TRUE(make_wait());
    const ChannelEvents::Held busy = events->held_at();
    gate.let_pass();
    EXPECT_TRUE(busy.any);
    EXPECT_EQ(busy.wait, 0U) << "its own work is not done";

    await([](const auto& held) { return held.any && held.wait == 1; });
    ASSERT_EQ(client.ask("stream unblock"), "ok");
    await([](const auto& held) { return !held.any; });
}

TEST_F(WaitsForAClient, MoreWaitsThanAreFollowedAreBehindThoseThatAre) {
    ASSERT_EQ(client.ask("stream block"), "ok");
    ASSERT_EQ(client.ask("event record"), "ok");
    for (std::size_t i = 0; i < 2 * limits::gpu_waits; ++i) ASSERT_TRUE(make_wait());
    await([](const auto& held) { return held.any && held.wait == 1; });
    ASSERT_EQ(client.ask("stream unblock"), "ok");
    await([](const auto& held) { return !held.any; });

    ASSERT_TRUE(make_wait()) << "room is free again";
    await([](const auto& held) { return !held.any; });
    synchronize();
}

}  // namespace
}  // namespace bulkhead::worker

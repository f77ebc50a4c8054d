// A client that only sends: a million requests, and it reads none of the answers.

#include <gtest/gtest.h>

#include "ipc/base/packet.h"
#include "tests/faults/raw_channel.h"
#include "tests/support/daemon/fleets.h"
#include "tests/support/daemon/sanitizer.h"
#include "tests/support/resident_kib.h"

namespace bulkhead::test {
namespace {

constexpr std::int64_t resident_slack_kib = 8 * 1024;

/// Sanitizers keep what was freed.
void expect_no_growth(pid_t worker, std::int64_t resident) {
    if (is_sanitized) return;
    EXPECT_LE(resident_kib(worker), resident + resident_slack_kib);
}

std::vector<std::byte> request_packet(RawChannel& channel) {
    channel::Infer request;
    request.request_id = 1;
    request.method = "forward";
    request.tensors.push_back(channel.tensor(4));
    return channel::encode(request).value();
}

TEST(ChannelAbuse, AMillionRequestsWhoseAnswersNobodyReadsCostTheirSenderItsChannelsAndNobodyElseAnything) {
    Daemon daemon{fleet({minimal_model("m")}), minimal()};
    RawChannel neighbour{daemon, "m"};
    neighbour.greet();
    const pid_t worker = daemon.pid("m");
    std::int64_t resident = 0;
    std::uint64_t served = 0;

    std::int64_t sent = 0;
    for (int channels = 0; sent < 1'000'000; ++channels) {
        RawChannel deaf{daemon, "m"};
        deaf.greet();
        std::vector<std::byte> packet = request_packet(deaf);
        while (sent < 1'000'000) {
            const std::uint64_t id = static_cast<std::uint64_t>(++sent);
            std::memcpy(packet.data() + offsetof(wire::Header, request_id), &id, sizeof id);
            if (!deaf.send(packet)) break;
        }
        if (channels % 64 == 0) neighbour.expect_served(++served);
        if (channels == 8) resident = resident_kib(worker);
        ASSERT_FALSE(HasFailure());
    }

    neighbour.expect_served(++served);
    EXPECT_EQ(daemon.pid("m"), worker);
    EXPECT_TRUE(daemon.wait_until("m", [](const auto& row) { return row.at("channels").as_int64() == 1; }));
    EXPECT_GT(resident, 0) << "one channel took them all: no bound was met";
    expect_no_growth(worker, resident);
}

TEST(ChannelAbuse, MessagesThatGetNoAnswerMayComeWithoutEnd) {
    Daemon daemon{fleet({minimal_model("m")}), minimal()};
    RawChannel client{daemon, "m"};
    client.greet();
    RawChannel neighbour{daemon, "m"};
    neighbour.greet();
    const pid_t worker = daemon.pid("m");
    client.expect_served(1);
    const std::int64_t resident = resident_kib(worker);
    const auto cancel = channel::encode(channel::Cancel{77});
    const auto nothing = channel::encode(channel::Release{});

    for (int i = 0; i < 100'000; ++i) {
        ASSERT_TRUE(client.send(cancel));
        ASSERT_TRUE(client.send(nothing));
        if (i % 10'000 == 0) neighbour.expect_served(static_cast<std::uint64_t>(i) + 1);
    }

    client.expect_served(2);
    expect_no_growth(worker, resident);
}

}  // namespace
}  // namespace bulkhead::test

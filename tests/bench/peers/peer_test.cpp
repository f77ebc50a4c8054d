#include "tests/bench/peers/peer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/bench/peers/script.h"

namespace bulkhead::bench {
namespace {

using testing::ElementsAre;

std::string why_left_out(std::vector<std::string> argv) {
    return take_part(std::move(argv), [](Peer& peer) {
        for (;;) {
            peer.start_round(1);
            (void)peer.collect();
        }
    });
}

TEST(Peer, OneThatCannotBeStartedIsLeftOut) {
    EXPECT_EQ(why_left_out({"/nowhere/tritonserver"}), "tritonserver cannot be started");
}

TEST(Peer, OneThatEndsBeforeItIsReadyIsLeftOutWithItsStatus) {
    EXPECT_EQ(why_left_out(script("exit 3")), "sh ended early, with status 3");
    EXPECT_EQ(why_left_out(script("kill -SEGV $$")), "sh ended early, by signal 11");
}

TEST(Peer, OneThatSaysWhyItCannotIsLeftOutWithThat) {
    EXPECT_EQ(why_left_out(script("printf '\\012'; zeros 7; printf 'without it'; exit 1")), "without it");
}

TEST(Peer, OneThatDiesWithinARoundIsLeftOutWithItsStatus) {
    EXPECT_EQ(why_left_out(script(ready + word + "exit 4")), "sh ended early, with status 4");
    EXPECT_EQ(why_left_out(script(ready + word + "zeros 40; " + word + "kill -KILL $$")),
              "sh ended early, by signal 9");
}

TEST(Peer, OneThatDiedBetweenTwoRoundsIsLeftOut) {
    const std::string why = take_part(script(ready + "exec cat > /dev/null"), [](Peer& peer) {
        peer.kill();
        peer.start_round(1);
    });
    EXPECT_EQ(why, "sh is gone");
}

TEST(Peer, OneThatAnswersTakesPart) {
    Peer::Round round{};
    const std::string why = take_part(script(ready + word + one_us + "cat"), [&](Peer& peer) {
        peer.start_round(1);
        round = peer.collect();
    });
    EXPECT_EQ(why, "");
    EXPECT_THAT(round.latencies_us, ElementsAre(1.0));
}

}  // namespace
}  // namespace bulkhead::bench

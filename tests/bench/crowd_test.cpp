#include "tests/bench/crowd.h"

#include <cmath>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/bench/peers/script.h"

namespace bulkhead::bench {
namespace {

using testing::ElementsAre;

using Command = std::vector<std::string>;

const Command answers = script(ready + "while [ $(head -c 8 | wc -c) = 8 ]; do " + one_us + "done");

/// Each exchange has as many clients as commands are here, one of each.
Way way_of(std::vector<Command> commands) {
    Way way{};
    way.client = [commands = std::move(commands), started = std::size_t{0}](const Exchange&) mutable {
        return commands.at(started++);
    };
    return way;
}

Exchange exchange_of(int clients) { return {64, true, clients}; }

TEST(Crowd, ClientsThatAnswerAreMeasuredTogether) {
    const Way way = way_of({answers, answers});
    Crowd crowd{way, exchange_of(2), Placement{On::any_cpu}};
    ASSERT_EQ(crowd.cannot(), "");
    EXPECT_EQ(crowd.round(), 1.0);
    EXPECT_EQ(crowd.round(), 1.0);
    EXPECT_THAT(crowd.so_far().latencies_us, ElementsAre(1.0, 1.0, 1.0, 1.0));
}

TEST(Crowd, OneClientThatCannotTakePartKeepsItsCrowdOut) {
    const std::vector<std::pair<Command, std::string>> lost{
        {{"/nowhere/client"}, "client cannot be started"},
        {script("exit 3"), "sh ended early, with status 3"},
        {script("printf '\\012'; zeros 7; printf 'without it'; exit 1"), "without it"},
    };
    for (const auto& [command, why] : lost) {
        const Way way = way_of({answers, command, answers});
        EXPECT_EQ((Crowd{way, exchange_of(3), Placement{On::any_cpu}}.cannot()), why);
    }
}

TEST(Crowd, OneClientThatDiesTakesItsCrowdOutAndNoOther) {
    const Way dying = way_of({answers, script(ready + word + one_us + word + "exit 4")});
    const Way living = way_of({answers});
    Crowd lost{dying, exchange_of(2), Placement{On::any_cpu}};
    Crowd crowd{living, exchange_of(1), Placement{On::any_cpu}};
    EXPECT_EQ(lost.round(), 1.0);
    EXPECT_EQ(crowd.round(), 1.0);

    EXPECT_TRUE(std::isnan(lost.round()));
    EXPECT_EQ(lost.cannot(), "sh ended early, with status 4");
    EXPECT_EQ(crowd.round(), 1.0);
    EXPECT_EQ(crowd.cannot(), "");
}

}  // namespace
}  // namespace bulkhead::bench

// Models that generate, through the daemon: streams of tokens, and a supervisor that is lost
// meanwhile.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include "tests/support/daemon/fleets.h"
#include "tests/support/daemon/generation.h"

namespace bulkhead::test {
namespace {

namespace json = boost::json;

TEST(Generation, GivesTheSameToWhoeverAsks) {
    Daemon daemon{fleet({tiny()})};
    Channel channel = daemon.open("tiny").value();
    const Answered streamed = generate(channel, prompt(3), greedy(40));
    ASSERT_FALSE(streamed.error) << streamed.error->text();
    EXPECT_EQ(streamed.streamed.size(), 40u);
    EXPECT_EQ(streamed.streamed, streamed.all);
    EXPECT_EQ(streamed.values.at("finish").as_string(), "length");
    const Answered other = generate(channel, prompt(100), greedy(40));
    EXPECT_NE(other.all, streamed.all);

    const Answered again = generate(channel, prompt(3), greedy(40));
    const Answered at_once = rest_of(channel, submit(channel, prompt(3), greedy(40), false).value());
    const Finished cli = daemon.cli({"--json", "generate", "tiny", "--tokens", "3,4,5,6,7,8,9,10", "--temperature", "0",
                                     "--max-new-tokens", "40", "--ignore-stop"});

    EXPECT_EQ(again.all, streamed.all) << "a slot shows no trace of what it held before";
    EXPECT_EQ(at_once.all, streamed.all);
    EXPECT_TRUE(at_once.streamed.empty());
    ASSERT_EQ(cli.exit_code, 0) << cli.err;
    const std::size_t last_line = cli.out.rfind('\n', cli.out.size() - 2) + 1;
    const json::value document = json::parse(cli.out.substr(last_line));
    EXPECT_EQ(json::value_to<std::vector<std::int64_t>>(document.at("tokens")), streamed.all);
    EXPECT_EQ(std::count(cli.out.begin(), cli.out.end(), '\n'), 41);
    EXPECT_TRUE(cli.out.starts_with("{\"token\":" + std::to_string(streamed.all.front()) + "}\n")) << cli.out;
}

constexpr int long_answer = 240;
/// Far more sequences of that length than are over before a test has done what it does in their
/// midst, and as many as a channel takes.
constexpr int many = 64;

std::vector<std::uint64_t> submit_many(Channel& channel) {
    std::vector<std::uint64_t> ids;
    for (int i = 0; i < many; ++i) ids.push_back(submit(channel, prompt(i + 1), greedy(long_answer)).value());
    return ids;
}

TEST(Generation, GoesOnWithoutASupervisor) {
    Daemon daemon{fleet({one_by_one()})};
    Channel channel = daemon.open("tiny").value();
    const pid_t worker = daemon.pid("tiny");
    const auto ids = submit_many(channel);
    std::vector<Answered> answers(ids.size());
    ASSERT_TRUE(take(channel, ids[0], answers[0]));

    const auto supervisor = static_cast<pid_t>(daemon.call("daemon.info").value().at("supervisor_pid").as_int64());
    ::kill(supervisor, SIGKILL);
    for (std::size_t i = 0; i < ids.size(); ++i) {
        answers[i] = rest_of(channel, ids[i], answers[i]);
        ASSERT_FALSE(answers[i].error) << i << ": " << answers[i].error->text();
        EXPECT_EQ(answers[i].streamed, answers[i].all);
    }

    EXPECT_EQ(daemon.pid("tiny"), worker);
    EXPECT_TRUE(daemon.wait_until("tiny", [](const json::object& row) {
        return row.at("generate").is_object() && row.at("generate").at("tokens").as_int64() == many * long_answer &&
               row.at("generate").at("slots").as_int64() == 1;
    })) << "the next supervisor hears the same counts";
}

}  // namespace
}  // namespace bulkhead::test

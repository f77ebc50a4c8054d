// Models that generate, through the daemon: streams of tokens, what shows of them, and what is refused.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/integration/fixture/fleets.h"
#include "tests/integration/fixture/generation.h"

namespace bulkhead::test {
namespace {

namespace json = boost::json;
using ::testing::HasSubstr;

constexpr std::int64_t vocabulary = 512;
constexpr std::int64_t length = 256;

TEST(Generation, StreamsTokensAndEndsWithAllOfThem) {
    Daemon daemon{fleet({tiny()})};
    Channel channel = daemon.open("tiny").value();
    const json::object& described = channel.methods().at("generate").as_object();
    EXPECT_EQ(described.at("vocabulary").as_int64(), vocabulary);
    EXPECT_EQ(described.at("length").as_int64(), length);
    EXPECT_EQ(described.at("package").as_string(), tiny_package().string());

    const Answered answered = generate(channel, prompt(3), greedy(40));

    ASSERT_FALSE(answered.error) << answered.error->text();
    EXPECT_EQ(answered.streamed.size(), 40u);
    EXPECT_EQ(answered.streamed, answered.all);
    EXPECT_EQ(answered.values.at("finish").as_string(), "length");
    EXPECT_EQ(answered.values.at("new_tokens").as_int64(), 40);
    EXPECT_EQ(answered.values.at("prompt_tokens").as_int64(), 8);
    EXPECT_GT(answered.values.at("tokens_per_second").to_number<double>(), 0);
    EXPECT_GT(answered.values.at("first_token_ms").to_number<double>(), 0);
}

TEST(Generation, GivesTheSameToWhoeverAsks) {
    Daemon daemon{fleet({tiny()})};
    Channel channel = daemon.open("tiny").value();
    const Answered streamed = generate(channel, prompt(3), greedy(40));
    ASSERT_FALSE(streamed.error);
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

TEST(Generation, ASeedMakesASampledSequenceComeAgain) {
    Daemon daemon{fleet({tiny()})};
    Channel channel = daemon.open("tiny").value();
    const auto sampled = [&](int seed) {
        return generate(channel, prompt(3),
                        {{"do_sample", true}, {"temperature", 1}, {"seed", seed}, {"max_new_tokens", 64}, {"ignore_stop", true}})
            .all;
    };
    const auto first = sampled(7);
    EXPECT_EQ(first.size(), 64u);
    EXPECT_NE(sampled(8), first);
    EXPECT_EQ(sampled(7), first);
}

TEST(Generation, AKnownPrefixIsNotComputedAgain) {
    Daemon daemon{fleet({tiny()})};
    Channel channel = daemon.open("tiny").value();
    std::vector<std::int64_t> longer = prompt(20, 64);
    const Answered fresh = generate(channel, longer, greedy(16));
    Daemon other{fleet({tiny()})};
    Channel elsewhere = other.open("tiny").value();
    ASSERT_FALSE(generate(elsewhere, prompt(20, 40), greedy(1)).error);

    const Answered reused = generate(elsewhere, longer, greedy(16));

    EXPECT_EQ(fresh.values.at("reused_tokens").as_int64(), 0);
    EXPECT_GE(reused.values.at("reused_tokens").as_int64(), 39);
    EXPECT_EQ(reused.all, fresh.all);
}

TEST(Generation, PsAndWhyShowIt) {
    Daemon daemon{fleet({tiny(), test_model("echo", "echo.pt")})};
    Channel channel = daemon.open("tiny").value();
    ASSERT_FALSE(generate(channel, prompt(3), greedy(40)).error);
    ASSERT_TRUE(daemon.wait_until("tiny", [](const json::object& row) {
        return row.at("generate").is_object() && row.at("generate").at("tokens").as_int64() == 40;
    }));

    EXPECT_EQ(told(daemon).at("slots").as_int64(), 4);
    EXPECT_TRUE(daemon.row("echo").at("generate").is_null());
    const std::string table = daemon.cli({"ps"}).out;
    EXPECT_THAT(table, HasSubstr("SLOTS  TOKENS/S"));
    EXPECT_THAT(table, HasSubstr("0/4"));
    const std::string why = daemon.cli({"why", "tiny"}).out;
    EXPECT_THAT(why, HasSubstr("generating: 0/4 slots; 40 tokens, "));
    EXPECT_THAT(why, HasSubstr("steps: p50 "));
}

}  // namespace
}  // namespace bulkhead::test

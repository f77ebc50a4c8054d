// Models that generate, through the daemon: streams of tokens, what shows of them, and what is refused.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>

#include "tests/integration/fixture/fleets.h"
#include "tests/integration/fixture/generation.h"

namespace bulkhead::test {
namespace {

namespace json = boost::json;
using ::testing::HasSubstr;
using ::testing::Not;

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

TEST(Generation, SeveralClientsGenerateSideBySide) {
    Daemon daemon{fleet({tiny("generate: {slots: 4}\n")})};
    std::vector<Answered> answers(6);
    {
        std::vector<std::jthread> clients;
        for (std::size_t i = 0; i < answers.size(); ++i)
            clients.emplace_back([&, i] {
                Channel channel = daemon.open("tiny").value();
                answers[i] = generate(channel, prompt(static_cast<std::int64_t>(50 * i)), greedy(100));
            });
    }
    for (const Answered& answered : answers) {
        ASSERT_FALSE(answered.error) << answered.error->text();
        EXPECT_EQ(answered.all.size(), 100u);
        EXPECT_EQ(answered.streamed, answered.all);
    }
    EXPECT_TRUE(daemon.wait_until("tiny", [](const json::object& row) {
        const json::object& generate = row.at("generate").as_object();
        return generate.at("tokens").as_int64() == 600 && generate.at("active").as_int64() == 0;
    }));
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

TEST(Generation, RefusesWhatMakesNoSenseAndServesOn) {
    Daemon daemon{fleet({tiny()})};
    Channel channel = daemon.open("tiny").value();
    const auto refused = [&](const std::vector<std::int64_t>& ids, json::object parameters, const char* words) {
        const Answered answered = generate(channel, ids, std::move(parameters));
        ASSERT_TRUE(answered.error) << words;
        EXPECT_EQ(answered.error->code, ErrorCode::input_invalid) << answered.error->text();
        EXPECT_THAT(answered.error->text(), HasSubstr(words));
        EXPECT_FALSE(answered.error->remedy.empty()) << answered.error->text();
    };

    refused({}, {}, "empty");
    refused(prompt(1, length + 1), {}, "257");
    refused({1, -1}, {}, "-1");
    refused({1, vocabulary}, {}, "512");
    refused({1}, {{"temperature", -1}}, "temperature");
    refused({1}, {{"temperature", "hot"}}, "temperature");
    refused({1}, {{"top_p", 0}}, "top_p");
    refused({1}, {{"top_p", 1.5}}, "top_p");
    refused({1}, {{"min_p", 2}}, "min_p");
    refused({1}, {{"top_k", -1}}, "top_k");
    refused({1}, {{"repetition_penalty", 0}}, "repetition_penalty");
    refused({1}, {{"ras_repeats", 2}}, "ras_repeats");
    refused({1}, {{"max_new_tokens", 0}}, "max_new_tokens");
    refused({1}, {{"seed", 1.5}}, "seed");
    refused({1}, {{"stop", json::array{vocabulary}}}, "stop");
    refused({1}, {{"banned", json::array{-1}}}, "banned");
    refused({1}, {{"temperature", 0}, {"do_sample", true}}, "do_sample");
    refused({1}, {{"temprature", 1}}, "temprature");

    const std::array<std::int64_t, 1> dims{1};
    const Input narrow = channel.allocate(wire::DType::int32, dims).value();
    const std::array<NamedInput, 1> of_int32{{{"tokens", &narrow}}};
    EXPECT_EQ(channel.infer({.method = "generate", .inputs = of_int32}).error().code, ErrorCode::dtype_unsupported);
    const Input wide = channel.allocate(wire::DType::int64, std::array<std::int64_t, 2>{1, 1}).value();
    const std::array<NamedInput, 1> of_two_dims{{{"tokens", &wide}}};
    EXPECT_EQ(channel.infer({.method = "generate", .inputs = of_two_dims}).error().code, ErrorCode::shape_mismatch);
    EXPECT_EQ(channel.infer({.method = "generate"}).error().code, ErrorCode::input_invalid);
    EXPECT_EQ(channel.infer({.method = "forward"}).error().code, ErrorCode::method_unknown);

    EXPECT_FALSE(generate(channel, {1}, greedy(4)).error);
}

/// Loading a fleet with this package fails. Returns  how
Error refused(const PackageCopy& package) {
    Daemon daemon{fleet({generating("broken", package.path())})};
    const auto loaded = daemon.load("broken");
    EXPECT_FALSE(loaded);
    return loaded ? Error{} : loaded.error();
}

TEST(BadPackage, SaysWhatIsWrongAndWhatToDo) {
    const auto says = [](const Error& error, ErrorCode code, const char* words) {
        EXPECT_EQ(error.code, code) << error.text();
        EXPECT_THAT(error.text(), HasSubstr(words));
        EXPECT_FALSE(error.remedy.empty()) << error.text();
    };
    {
        const PackageCopy other_torch;
        other_torch.set("torch", "1.13.1");
        says(refused(other_torch), ErrorCode::package_incompatible, "1.13.1");
    }
    {
        const PackageCopy of_a_gpu;
        of_a_gpu.set("device", "cuda");
        says(refused(of_a_gpu), ErrorCode::package_incompatible, "cuda");
    }
    {
        const PackageCopy truncated;
        std::filesystem::resize_file(truncated.path() / "weights.safetensors", 100'000);
        says(refused(truncated), ErrorCode::package_incompatible, "weights.safetensors");
    }
    {
        const PackageCopy without_method;
        std::filesystem::remove(without_method.path() / "decode.pt2");
        says(refused(without_method), ErrorCode::load_failed, "decode.pt2");
    }
    {
        const PackageCopy of_nothing_known;
        of_nothing_known.set("format", "bulkhead-generate/9");
        says(refused(of_nothing_known), ErrorCode::package_incompatible, "bulkhead-generate/9");
    }
}

}  // namespace
}  // namespace bulkhead::test

/// The parameters of a request for tokens: what they do, when they change, and what is refused.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/unit/worker/generation_channel_fixture.h"

namespace bulkhead::worker {
namespace {

namespace json = boost::json;
using test::FakeEngine;
using test::Heard;
using test::Ids;
using test::TestClient;
using testing::HasSubstr;

using GenerationParameters = test::GenerationChannel;

TEST_F(GenerationParameters, TellsTheSeedThatItChose) {
    TestClient client = first_channel();
    ask(client, 1, {1, 2, 3}, {{"temperature", 0.5}, {"max_new_tokens", 8}, {"ignore_stop", true}});
    const Heard first = listen(client, 1)[1];
    ask(client, 2, {1, 2, 3},
        {{"temperature", 0.5}, {"max_new_tokens", 8}, {"ignore_stop", true}, {"seed", first.last->values.at("seed")}});
    const Heard second = listen(client, 1)[2];
    EXPECT_EQ(tokens_of(client, first), tokens_of(client, second));
}

TEST_F(GenerationParameters, ObeysTheManifestsDefaultsAndTheRequestsStops) {
    shape.sampling = {{"max_new_tokens", 5}, {"do_sample", true}, {"temperature", 0.5}, {"top_k", 1000}};
    shape.stop = {static_cast<std::int32_t>(expected({1, 2, 3}, 4).back())};
    TestClient client = first_channel();
    ask(client, 1, {1, 2, 3}, {{"ignore_stop", true}, {"seed", 9}});
    const Heard sampled = listen(client, 1)[1];
    EXPECT_EQ(test::number(sampled.last->values, "new_tokens"), 5U);
    EXPECT_EQ(test::number(sampled.last->values, "seed"), 9U);
    ask(client, 2, {1, 2, 3}, {{"temperature", 0}, {"max_new_tokens", 20}});
    const Heard stopped = listen(client, 1)[2];
    EXPECT_EQ(stopped.last->values.at("finish").as_string(), "stop");
    EXPECT_EQ(tokens_of(client, stopped), expected({1, 2, 3}, 4));
    const std::int64_t second = expected({1, 2, 3}, 2).back();
    ask(client, 3, {1, 2, 3}, {{"temperature", 0}, {"stop_also", json::array{second}}});
    EXPECT_EQ(tokens_of(client, listen(client, 1)[3]), expected({1, 2, 3}, 2));
    ask(client, 4, {1, 2, 3}, {{"temperature", 0}, {"stop", second}});
    EXPECT_EQ(tokens_of(client, listen(client, 1)[4]), expected({1, 2, 3}, 2));
}

TEST_F(GenerationParameters, ChangesHowARunningSequenceDraws) {
    gated = true;
    TestClient client = first_channel();
    ask(client, 1, {1, 2, 3}, {{"seed", 5}, {"temperature", 0.7}, {"max_new_tokens", 6}, {"ignore_stop", true}});
    log->gate.await_arrivals(1);
    client.infer(2, "generate.adjust", {}, {{"request", 1}, {"temperature", 0}});
    EXPECT_TRUE(client.expect_result(2).tensors.empty());
    for (const auto& [parameters, words] : std::vector<std::pair<json::object, std::string>>{
             {{{"request", 9}, {"top_k", 4}}, "request 9 of this channel is not generating"},
             {{{"top_k", 4}}, "calling generate.adjust: parameter \"request\" is missing"},
             {{{"request", 1}, {"top_p", 0}}, "calling generate.adjust: parameter \"top_p\" is 0"},
             {{{"request", 1}, {"max_new_tokens", 4}}, "its parameters: do_sample, guidance"}}) {
        client.infer(3, "generate.adjust", {}, parameters);
        EXPECT_THAT(client.expect_error(3, ErrorCode::input_invalid).text(), HasSubstr(words));
    }
    log->gate.open();
    const Heard heard = listen(client, 1)[1];
    Ids given = tokens_of(client, heard);
    Ids before{1, 2, 3};
    generation::Sampling first{.temperature = 0.7F, .do_sample = true, .seed = 5};
    EXPECT_EQ(given.at(0), FakeEngine::next(before, shape, first, 0));
    before.push_back(given[0]);
    given.erase(given.begin());
    EXPECT_EQ(given, expected(before, 5));  // greedy from the second step on
}

TEST_F(GenerationParameters, OfAModelThatLooksBackHoldTheRepeatsThatItAllows) {
    shape.ras_window = 4;
    shape.sampling = {{"ras_repeats", 2}};
    start_ready();
    const auto repeats = [&](const json::object& parameters) {
        generation::GenerateParameters ask;
        ask.prompt_length = 1;
        const Result<> read = generation::read_parameters(shape, parameters, ask);
        EXPECT_TRUE(read) << read.error().text();
        return ask.sampling.ras_repeats;
    };
    EXPECT_EQ(repeats({}), 2U);
    EXPECT_EQ(repeats({{"ras_repeats", 0}}), 0U);
    EXPECT_EQ(repeats({{"ras_repeats", 16}}), 16U);
    const auto now = [](std::uint64_t) -> Result<generation::Sampling> {
        return generation::Sampling{.ras_repeats = 2};
    };
    const auto off = generation::read_adjustment(shape, {{"request", 1}, {"ras_repeats", 0}}, now);
    ASSERT_TRUE(off) << off.error().text();
    EXPECT_EQ(off->sampling.ras_repeats, 0U);
    const auto other = generation::read_adjustment(shape, {{"request", 1}, {"top_k", 4}}, now);
    ASSERT_TRUE(other) << other.error().text();
    EXPECT_EQ(other->sampling.ras_repeats, 2U);

    TestClient client = open_channel();
    ask(client, 1, {1}, {{"ras_repeats", 17}});
    EXPECT_THAT(listen(client, 1)[1].error->text(), HasSubstr("\"ras_repeats\" is 17; give an integer from 0 to 16"));
}

TEST_F(GenerationParameters, GreedySequencesThatComeToDrawHaveSeedsOfTheirOwn) {
    gated = true;
    TestClient client = first_channel();
    for (std::uint64_t request = 1; request <= 2; ++request)
        ask(client, request, {1, 2, 3}, {{"max_new_tokens", 4}, {"ignore_stop", true}});
    log->gate.await_arrivals(1);
    for (std::uint64_t request = 1; request <= 2; ++request) {
        client.infer(10 + request, "generate.adjust", {}, {{"request", request}, {"do_sample", true}});
        EXPECT_TRUE(client.expect_result(10 + request).tensors.empty());
    }
    log->gate.open();
    auto heard = listen(client, 2);
    EXPECT_NE(test::number(heard[1].last->values, "seed"), test::number(heard[2].last->values, "seed"));
}

struct Bad {
    Ids tokens;
    std::string parameters;
    ErrorCode code;
    std::string words;  ///< in attempt or remedy
};

std::string all_banned() {
    json::array banned;
    for (int token = 0; token < 64; ++token) banned.push_back(token);
    return json::serialize(json::object{{"banned", std::move(banned)}});
}

TEST_F(GenerationParameters, RefusesBadRequestsInWordsThatHelp) {
    TestClient client = first_channel();
    const Bad all[] = {
        {{}, "{}", ErrorCode::input_invalid, "the prompt is empty"},
        {Ids(65, 1), "{}", ErrorCode::input_invalid, "the prompt has 65 positions, and a sequence has 64"},
        {{1, 64}, "{}", ErrorCode::input_invalid, "token 1 of the prompt is 64; send ids from 0 to 63"},
        {{-1}, "{}", ErrorCode::input_invalid, "token 0 of the prompt is -1"},
        {{1}, R"({"temprature": 1})", ErrorCode::input_invalid, "its parameters: banned, do_sample"},
        {{1},
         R"({"temperature": -0.5})",
         ErrorCode::input_invalid,
         "\"temperature\" is -5E-1; give a number of at least 0"},
        {{1}, R"({"temperature": 1e300})", ErrorCode::input_invalid, "at most 100"},
        {{1}, R"({"temperature": "hot"})", ErrorCode::input_invalid, "\"temperature\" is \"hot\""},
        {{1}, R"({"temperature": 0, "do_sample": true})", ErrorCode::input_invalid, "contradict each other"},
        {{1}, R"({"top_p": 0})", ErrorCode::input_invalid, "for greedy generation give temperature 0"},
        {{1}, R"({"top_p": 1.5})", ErrorCode::input_invalid, "\"top_p\" is 1.5E0; give a number above 0 and at most 1"},
        {{1}, R"({"top_k": -1})", ErrorCode::input_invalid, "\"top_k\" is -1; give an integer from 0"},
        {{1}, R"({"top_k": 1.5})", ErrorCode::input_invalid, "\"top_k\""},
        {{1}, R"({"min_p": 2})", ErrorCode::input_invalid, "\"min_p\" is 2"},
        {{1}, R"({"repetition_penalty": 0})", ErrorCode::input_invalid, "\"repetition_penalty\" is 0"},
        {{1},
         R"({"repetition_penalty": 1e-39})",
         ErrorCode::input_invalid,
         "\"repetition_penalty\" is 1E-39; give a number of at least 0.01 and at most 100"},
        {{1}, R"({"seed": -3})", ErrorCode::input_invalid, "\"seed\" is -3"},
        {{1},
         R"({"max_new_tokens": 0})",
         ErrorCode::input_invalid,
         "\"max_new_tokens\" is 0; give an integer from 1 to 64"},
        {{1}, R"({"guidance": 2})", ErrorCode::input_invalid, "\"guidance\" of a model that has none"},
        {{1}, R"({"ras_repeats": 2})", ErrorCode::input_invalid, "of a model without repetition-aware sampling"},
        {{1}, R"({"do_sample": 1})", ErrorCode::input_invalid, "give true or false"},
        {{1}, R"({"do_sample": false, "temperature": 0.7})", ErrorCode::input_invalid, "contradict"},
        {{1}, all_banned(), ErrorCode::input_invalid, "holds all 64 tokens"},
        {{1}, R"({"stop": [64]})", ErrorCode::input_invalid, "\"stop\" is 64; give token ids from 0 to 63"},
        {{1},
         R"({"stop": [3], "ignore_stop": true})",
         ErrorCode::input_invalid,
         "\"ignore_stop\" true beside \"stop\""},
        {{1}, R"({"banned": ["x"]})", ErrorCode::input_invalid, "\"banned\" is \"x\""},
        {{1}, R"({"forced": 3})", ErrorCode::input_invalid, "an entry for each step"},
        {{1}, R"({"forced": [3], "banned": [3]})", ErrorCode::input_invalid, "in \"forced\" and in \"banned\""},
        {{1}, R"({"forced": [1, 2], "max_new_tokens": 1})", ErrorCode::input_invalid, "has 2 steps"},
    };
    std::uint64_t request = 0;
    for (const Bad& bad : all) {
        SCOPED_TRACE(bad.parameters);
        ++request;
        ask(client, request, bad.tokens, json::parse(bad.parameters).as_object());
        const auto heard = listen(client, 1);
        const auto found = heard.find(request);
        if (found == heard.end() || !found->second.error) {
            ADD_FAILURE() << "no error for request " << request
                          << (heard.empty() || !heard.begin()->second.error ? "" : heard.begin()->second.error->text());
            continue;
        }
        EXPECT_EQ(to_string(found->second.error->code), to_string(bad.code));
        EXPECT_THAT(found->second.error->text(), HasSubstr(bad.words));
    }
    ask(client, 1, {1}, {{"max_new_tokens", 3}, {"ignore_stop", true}});  // and all is well
    EXPECT_EQ(tokens_of(client, listen(client, 1)[1]), expected({1}, 3));
}

}  // namespace
}  // namespace bulkhead::worker

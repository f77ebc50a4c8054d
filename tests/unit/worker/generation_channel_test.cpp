/// Generation as a client sees it: streams, answers, and what ends them.

#include <cstring>
#include <map>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/unit/worker/fake_engine.h"
#include "tests/unit/worker/loop_harness.h"

namespace bulkhead::worker {
namespace {

namespace json = boost::json;
using test::FakeEngine;
using test::TestClient;
using testing::AllOf;
using testing::HasSubstr;
using testing::UnorderedElementsAre;
using namespace std::chrono_literals;

using Ids = std::vector<std::int64_t>;

class GeneratingModel final : public test::FakeModel {
public:
    GeneratingModel(std::shared_ptr<test::ModelLog> log, std::shared_ptr<FakeEngine> engine)
        : FakeModel{std::move(log)}, engine_{std::move(engine)} {}
    generation::Engine* generator() noexcept override { return engine_.get(); }

private:
    std::shared_ptr<FakeEngine> engine_;
};

/// All that came for one request.
struct Heard {
    Ids streamed;
    std::size_t parts = 0;
    std::optional<channel::InferResult> last;
    std::optional<Error> error;
};

class GenerationChannel : public test::LoopTest {
protected:
    GenerationChannel() {
        spec.runtime = config::Runtime::generate;
        spec.file = "/nonexistent/package";
        load = [this](const config::ModelSpec&, const LoadContext&) -> Result<std::unique_ptr<Model>> {
            engine = std::make_shared<FakeEngine>(shape);
            engine->listens = false;
            if (gated) engine->at_launch = [this] { log->gate.pass(); };
            return std::unique_ptr<Model>{std::make_unique<GeneratingModel>(log, engine)};
        };
    }

    static void ask(TestClient& client, std::uint64_t request_id, const Ids& tokens, json::object parameters = {},
                    std::chrono::milliseconds deadline = 0ms) {
        client.infer(request_id, "generate", {tensor(client, tokens, request_id)}, std::move(parameters), deadline);
    }
    /// Each request has 4 KiB of the input slab to itself.
    static channel::Tensor tensor(TestClient& client, const Ids& tokens, std::uint64_t request_id) {
        const auto& [offer, memory] = *client.find_slab(wire::SlabDirection::input);
        const std::uint64_t offset = (request_id % 16) * 4096;
        std::memcpy(memory.bytes().data() + offset, tokens.data(), tokens.size() * sizeof tokens[0]);
        return {"tokens",
                wire::DType::int64,
                {static_cast<std::int64_t>(tokens.size())},
                {offer.slab_id, 0, offset, tokens.size() * sizeof tokens[0], request_id}};
    }
    /// Reads until each of these requests has its answer.
    std::map<std::uint64_t, Heard> listen(TestClient& client, std::size_t answers) {
        std::map<std::uint64_t, Heard> heard;
        while (answers > 0) {
            auto message = client.receive_answer();
            if (!message) {
                ADD_FAILURE() << "the channel ended";
                break;
            }
            if (const auto* failure = std::get_if<channel::Failure>(&*message)) {
                heard[failure->request_id].error = failure->error;
                --answers;
                continue;
            }
            auto& result = std::get<channel::InferResult>(*message);
            Heard& of = heard[result.request_id];
            if (result.more) {
                EXPECT_EQ(test::number(result.values, "index"), of.streamed.size());
                for (const json::value& token : result.values.at("tokens").as_array())
                    of.streamed.push_back(token.to_number<std::int64_t>());
                ++of.parts;
            } else {
                of.last = std::move(result);
                --answers;
            }
        }
        return heard;
    }
    static Ids tokens_of(const TestClient& client, const Heard& heard) {
        const channel::Tensor& tensor = heard.last->tensors.at(0);
        EXPECT_EQ(tensor.name, "tokens");
        EXPECT_EQ(tensor.dtype, wire::DType::int64);
        for (const auto& [offer, memory] : client.slabs)
            if (offer.slab_id == tensor.lease.slab_id) {
                Ids ids(tensor.lease.size_bytes / sizeof(std::int64_t));
                std::memcpy(ids.data(), memory.bytes().data() + tensor.lease.offset_bytes, tensor.lease.size_bytes);
                return ids;
            }
        ADD_FAILURE() << "a result in a slab that was never offered";
        return {};
    }
    /// Greedy, without stop tokens.
    Ids expected(Ids before, std::size_t count) const {
        Ids given;
        for (std::size_t i = 0; i < count; ++i) {
            given.push_back(FakeEngine::next(before, shape, {}, 0));
            before.push_back(given.back());
        }
        return given;
    }
    json::object generation() {
        say({{"type", "statistics_asked"}});
        return expect_said("statistics").at("generation").as_object();
    }
    void await_active(std::uint64_t count) {
        const auto until = Clock::now() + test::patience;
        while (test::number(generation(), "active") != count)
            ASSERT_LT(Clock::now(), until) << "never " << count << " active";
    }

    generation::Shape shape = FakeEngine::usual();
    bool gated = false;
    std::shared_ptr<FakeEngine> engine;
};

constexpr std::uint64_t streaming = wire::feature_streaming;

TEST_F(GenerationChannel, IsDescribedToClientsAndDaemon) {
    start_ready();
    TestClient client = open_channel(streaming);
    EXPECT_EQ(client.welcome.features & streaming, streaming);
    for (const json::object& methods : {client.welcome.methods, ready.at("methods").as_object()}) {
        const json::object& generate = methods.at("generate").as_object();
        EXPECT_EQ(generate.at("package").as_string(), "/nonexistent/package");
        EXPECT_EQ(generate.at("inputs").at(0).at("shape").at(0).as_string(), "T=1..64");
        EXPECT_EQ(generate.at("outputs").at(0).at("name").as_string(), "tokens");
        EXPECT_EQ(test::number(generate, "vocabulary"), 64U);
        EXPECT_EQ(test::number(generate, "slots"), 4U);
        EXPECT_EQ(test::number(generate, "length"), 64U);
        EXPECT_EQ(generate.at("stop").at(0).to_number<int>(), 63);
        EXPECT_TRUE(methods.contains("echo"));  // the package's further methods
    }
}

TEST_F(GenerationChannel, StreamsTokensAndThenAnswersWithAllOfThem) {
    start_ready();
    TestClient client = open_channel(streaming);
    ask(client, 7, {1, 2, 3}, {{"max_new_tokens", 12}, {"ignore_stop", true}});
    const Heard heard = listen(client, 1)[7];
    ASSERT_TRUE(heard.last) << heard.error->text();
    EXPECT_EQ(heard.streamed, expected({1, 2, 3}, 12));
    EXPECT_EQ(tokens_of(client, heard), heard.streamed);
    const json::object& values = heard.last->values;
    EXPECT_EQ(values.at("finish").as_string(), "length");
    EXPECT_EQ(test::number(values, "prompt_tokens"), 3U);
    EXPECT_EQ(test::number(values, "reused_tokens"), 0U);
    EXPECT_EQ(test::number(values, "new_tokens"), 12U);
    EXPECT_GT(values.at("first_token_ms").to_number<double>(), 0);
    EXPECT_GT(values.at("tokens_per_second").to_number<double>(), 0);
    EXPECT_FALSE(values.contains("seed"));
}

TEST_F(GenerationChannel, AnswersOnceWhereStreamingWasNotAgreed) {
    start_ready();
    TestClient client = open_channel();
    ask(client, 7, {1, 2, 3}, {{"max_new_tokens", 12}, {"ignore_stop", true}});
    const Heard heard = listen(client, 1)[7];
    ASSERT_TRUE(heard.last);
    EXPECT_EQ(heard.parts, 0U);
    EXPECT_EQ(tokens_of(client, heard), expected({1, 2, 3}, 12));
}

TEST_F(GenerationChannel, SendsAnArrayForEachStepOfSeveralCodebooks) {
    shape.codebooks = 2;
    shape.inputs[0].shape.push_back({2, 2});
    start_ready();
    TestClient client = open_channel(streaming);
    channel::Tensor prompt = tensor(client, {1, 2, 3, 4}, 1);
    prompt.dims = {2, 2};
    client.infer(1, "generate", {prompt}, {{"max_new_tokens", 3}, {"ignore_stop", true}});
    Ids streamed;
    for (;;) {
        const auto message = client.receive_answer();
        ASSERT_TRUE(message && std::holds_alternative<channel::InferResult>(*message));
        const auto& result = std::get<channel::InferResult>(*message);
        if (!result.more) {
            EXPECT_THAT(result.tensors.at(0).dims, testing::ElementsAre(3, 2));
            break;
        }
        for (const json::value& step : result.values.at("tokens").as_array()) {
            ASSERT_EQ(step.as_array().size(), 2U);
            for (const json::value& token : step.as_array()) streamed.push_back(token.to_number<std::int64_t>());
        }
    }
    Ids before{1, 2, 3, 4};
    for (std::size_t i = 0; i < streamed.size(); i += 2) {
        EXPECT_EQ(streamed[i], FakeEngine::next(before, shape, {}, 0));
        EXPECT_EQ(streamed[i + 1], FakeEngine::next(before, shape, {}, 1));
        before.insert(before.end(), {streamed[i], streamed[i + 1]});
    }
    EXPECT_EQ(streamed.size(), 6U);
}

TEST_F(GenerationChannel, TellsTheSeedThatItChose) {
    start_ready();
    TestClient client = open_channel();
    ask(client, 1, {1, 2, 3}, {{"temperature", 0.5}, {"max_new_tokens", 8}, {"ignore_stop", true}});
    const Heard first = listen(client, 1)[1];
    ask(client, 2, {1, 2, 3},
        {{"temperature", 0.5}, {"max_new_tokens", 8}, {"ignore_stop", true}, {"seed", first.last->values.at("seed")}});
    const Heard second = listen(client, 1)[2];
    EXPECT_EQ(tokens_of(client, first), tokens_of(client, second));
}

TEST_F(GenerationChannel, ServesManySequencesOfManyChannels) {
    start_ready();
    std::vector<TestClient> clients;
    for (int i = 0; i < 3; ++i) clients.push_back(open_channel(streaming));
    for (std::uint64_t round = 0; round < 5; ++round)
        for (std::size_t i = 0; i < clients.size(); ++i)
            ask(clients[i], round + 1, {static_cast<std::int64_t>(i), static_cast<std::int64_t>(round), 3},
                {{"max_new_tokens", 5 + 7 * i}, {"ignore_stop", true}});
    for (std::size_t i = 0; i < clients.size(); ++i) {
        auto heard = listen(clients[i], 5);
        for (std::uint64_t round = 0; round < 5; ++round) {
            const Heard& of = heard[round + 1];
            ASSERT_TRUE(of.last);
            EXPECT_EQ(of.streamed,
                      expected({static_cast<std::int64_t>(i), static_cast<std::int64_t>(round), 3}, 5 + 7 * i));
        }
    }
    const json::object counts = generation();
    EXPECT_EQ(test::number(counts, "tokens"), 5U * (5 + 12 + 19));
    EXPECT_EQ(test::number(counts, "active"), 0U);
    EXPECT_EQ(test::number(counts, "slots"), 4U);
    EXPECT_TRUE(counts.contains("moves") && counts.contains("buckets") && counts.contains("eager"));
}

TEST_F(GenerationChannel, CancelsBeforeTheNextStep) {
    gated = true;
    start_ready();
    TestClient client = open_channel(streaming);
    ask(client, 1, {1, 2, 3});
    log->gate.await_arrivals(1);
    client.send(channel::encode(channel::Cancel{1}));
    client.expect_error(1, ErrorCode::cancelled);
    log->gate.let_one_pass();
    await_active(0);  // though no second step was let through
}

TEST_F(GenerationChannel, FreesTheSlotOfAClientThatIsGone) {
    shape.slots = 1;
    shape.length = 1 << 18;  // which the sequence would take minutes to fill
    gated = true;
    start_ready();
    TestClient gone = open_channel(streaming);
    ask(gone, 1, {1, 2, 3}, {{"ignore_stop", true}});
    log->gate.await_arrivals(1);
    gone.close();
    log->gate.open();
    expect_said("channel_closed");
    await_active(0);
    TestClient next = open_channel();
    ask(next, 1, {1, 2, 3}, {{"max_new_tokens", 4}, {"ignore_stop", true}});
    Heard heard = listen(next, 1)[1];
    EXPECT_EQ(tokens_of(next, heard), expected({1, 2, 3}, 4));
}

TEST_F(GenerationChannel, QueuesBeyondTheSlotsByTurnsOfChannels) {
    shape.slots = 1;
    gated = true;
    start_ready();
    TestClient many = open_channel();
    TestClient one = open_channel();
    const json::object two_steps{{"max_new_tokens", 1}, {"ignore_stop", true}};
    for (std::uint64_t request = 1; request <= 3; ++request) ask(many, request, {1, 2}, two_steps);
    log->gate.await_arrivals(1);
    await_statistics("queued", 2);
    ask(one, 1, {3, 4}, two_steps);
    await_statistics("queued", 3);
    log->gate.let_one_pass();  // the one that runs; then the other channel has its turn
    log->gate.let_one_pass();
    log->gate.let_one_pass();
    EXPECT_TRUE(listen(one, 1)[1].last);
    auto heard = listen(many, 2);
    EXPECT_TRUE(heard[1].last && heard[2].last);
    log->gate.open();
    EXPECT_TRUE(listen(many, 1)[3].last);
}

TEST_F(GenerationChannel, RefusesBeyondTheQueue) {
    shape.slots = 1;
    spec.queue_bound = 2;
    spec.channel.channels_max = 1;  // so that one channel may fill the queue
    gated = true;
    start_ready();
    TestClient client = open_channel();
    for (std::uint64_t request = 1; request <= 4; ++request) ask(client, request, {1, 2});
    EXPECT_EQ(listen(client, 1)[4].error->code, ErrorCode::queue_full) << "one runs, two wait";
}

TEST_F(GenerationChannel, EndsWhatIsOutOfTimeRunningOrWaiting) {
    shape.slots = 1;
    gated = true;
    start_ready();
    TestClient client = open_channel();
    ask(client, 1, {1, 2}, {}, 30ms);
    log->gate.await_arrivals(1);
    ask(client, 2, {1, 2}, {}, 30ms);
    auto heard = listen(client, 2);
    EXPECT_THAT(heard[1].error->text(), AllOf(HasSubstr("deadline_exceeded"), HasSubstr("not complete")));
    EXPECT_THAT(heard[2].error->text(), AllOf(HasSubstr("deadline_exceeded"), HasSubstr("waiting")));
    log->gate.let_one_pass();
    await_active(0);
}

TEST_F(GenerationChannel, RunsOtherMethodsBetweenTwoSteps) {
    gated = true;
    start_ready();
    TestClient client = open_channel();
    ask(client, 15, {1, 2}, {{"max_new_tokens", 3}, {"ignore_stop", true}});
    log->gate.await_arrivals(1);
    client.infer(2, "echo", {client.tensor({4})});
    await_statistics("in_flight", 2);
    log->gate.let_one_pass();
    client.expect_result(2);  // while the second step is held up
    log->gate.open();
    EXPECT_TRUE(listen(client, 1)[15].last);
}

TEST_F(GenerationChannel, FinishesSequencesBeforeItIsDrained) {
    gated = true;
    start_ready();
    TestClient client = open_channel(streaming);
    ask(client, 1, {1, 2}, {{"max_new_tokens", 6}, {"ignore_stop", true}});
    log->gate.await_arrivals(1);
    say({{"type", "drain"}, {"deadline_ms", 20000}});
    EXPECT_TRUE(std::holds_alternative<channel::Closing>(*client.receive_answer()));
    ask(client, 2, {1, 2});
    client.expect_error(2, ErrorCode::worker_draining);
    log->gate.open();
    EXPECT_EQ(listen(client, 1)[1].streamed, expected({1, 2}, 6));
    expect_said("drained");
    EXPECT_EQ(expect_exit(), 0);
}

TEST_F(GenerationChannel, EndsSequencesWhenTheDrainTakesTooLong) {
    gated = true;
    start_ready();
    TestClient client = open_channel(streaming);
    ask(client, 1, {1, 2});
    log->gate.await_arrivals(1);
    say({{"type", "drain"}, {"deadline_ms", 50}});
    EXPECT_TRUE(std::holds_alternative<channel::Closing>(*client.receive_answer()));
    client.expect_error(1, ErrorCode::worker_draining);
    EXPECT_EQ(expect_exit(), 1);
}

TEST_F(GenerationChannel, SaysWhenOneStepExceedsTheModelsDeadline) {
    spec.deadlines.request = 20ms;
    gated = true;
    start_ready();
    TestClient client = open_channel();
    ask(client, 1, {1, 2});
    const json::object overrun = expect_said("overrun");
    EXPECT_EQ(overrun.at("method").as_string(), "generate");
    EXPECT_GE(test::number(overrun, "running_ms"), 20U);
}

TEST_F(GenerationChannel, LetsASequenceTakeLongerThanAStepMay) {
    spec.deadlines.request = 30ms;
    shape.length = 4096;
    shape.inputs[0].shape[0].max = 4096;
    spec.channel.input_bytes = 256 * 1024;
    start_ready();
    TestClient client = open_channel();
    ask(client, 1, {1, 2}, {{"max_new_tokens", 4000}, {"ignore_stop", true}});
    EXPECT_TRUE(listen(client, 1)[1].last);
    EXPECT_THAT(said, testing::Not(testing::Contains("overrun")));
}

TEST_F(GenerationChannel, GathersTokensForAClientThatReadsSlowly) {
    shape.length = 4096;
    shape.inputs[0].shape[0].max = 4096;
    start_ready();
    TestClient client = open_channel(streaming);
    ask(client, 1, {1, 2}, {{"max_new_tokens", 4000}, {"ignore_stop", true}});
    await_statistics("requests", 1);
    await_active(0);  // it was generated to its end, and nobody has read
    const Heard heard = listen(client, 1)[1];
    ASSERT_TRUE(heard.last);
    EXPECT_EQ(heard.streamed, expected({1, 2}, 4000));
    EXPECT_LT(heard.parts, 2000U);
    EXPECT_EQ(tokens_of(client, heard), heard.streamed);
}

TEST_F(GenerationChannel, EndsTheStreamOfAClientThatStopsReading) {
    unread_stream = 30ms;
    shape.length = 1 << 18;
    shape.inputs[0].shape[0].max = 1 << 18;
    start_ready();
    TestClient client = open_channel(streaming);
    ask(client, 1, {1, 2}, {{"ignore_stop", true}});
    await_statistics("requests", 1);
    await_active(0);
    const Heard heard = listen(client, 1)[1];
    ASSERT_TRUE(heard.error);
    EXPECT_EQ(heard.error->code, ErrorCode::cancelled);
    EXPECT_THAT(heard.error->attempt, HasSubstr("took no part of the stream"));
    EXPECT_GT(heard.parts, 0U);
    ask(client, 2, {1, 2}, {{"max_new_tokens", 3}, {"ignore_stop", true}});
    EXPECT_EQ(listen(client, 1)[2].streamed, expected({1, 2}, 3));
}

TEST_F(GenerationChannel, ChangesHowARunningSequenceDraws) {
    gated = true;
    start_ready();
    TestClient client = open_channel();
    ask(client, 1, {1, 2, 3}, {{"seed", 5}, {"temperature", 0.7}, {"max_new_tokens", 6}, {"ignore_stop", true}});
    log->gate.await_arrivals(1);
    client.infer(2, "generate.adjust", {}, {{"request", 1}, {"temperature", 0}});
    EXPECT_TRUE(client.expect_result(2).tensors.empty());
    for (const auto& [parameters, words] : std::vector<std::pair<json::object, std::string>>{
             {{{"request", 9}, {"top_k", 4}}, "request 9 of this channel is generating nothing"},
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

TEST_F(GenerationChannel, GreedySequencesThatComeToDrawHaveSeedsOfTheirOwn) {
    gated = true;
    start_ready();
    TestClient client = open_channel();
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

TEST_F(GenerationChannel, RefusesBadRequestsInWordsThatHelp) {
    start_ready();
    TestClient client = open_channel();
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
        {{1}, R"({"seed": -3})", ErrorCode::input_invalid, "\"seed\" is -3"},
        {{1},
         R"({"max_new_tokens": 0})",
         ErrorCode::input_invalid,
         "\"max_new_tokens\" is 0; give an integer from 1 to 64"},
        {{1}, R"({"guidance": 2})", ErrorCode::input_invalid, "\"guidance\" of a model that has none"},
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

TEST_F(GenerationChannel, ObeysTheManifestsDefaultsAndTheRequestsStops) {
    shape.sampling = {{"max_new_tokens", 5}, {"do_sample", true}, {"temperature", 0.5}, {"top_k", 1000}};
    shape.stop = {static_cast<std::int32_t>(expected({1, 2, 3}, 4).back())};
    start_ready();
    TestClient client = open_channel();
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

}  // namespace
}  // namespace bulkhead::worker

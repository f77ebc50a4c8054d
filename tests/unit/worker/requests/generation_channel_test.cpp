/// Generation as a client sees it: descriptions, streams, answers, and its turn among others.

#include <sys/resource.h>

#include <atomic>
#include <optional>
#include <thread>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/unit/worker/generation_channel_fixture.h"
#include "worker/loop/limits.h"

namespace bulkhead::worker {
namespace {

namespace json = boost::json;
using test::FakeEngine;
using test::GenerationChannel;
using test::Heard;
using test::Ids;
using test::streaming;
using test::TestClient;
using namespace std::chrono_literals;

TEST_F(GenerationChannel, IsDescribedToClientsAndDaemon) {
    TestClient client = first_channel(streaming);
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
    TestClient client = first_channel(streaming);
    ask(client, 7, {1, 2, 3}, exactly(12));
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

TEST_F(GenerationChannel, SendsAnArrayForEachStepOfSeveralCodebooks) {
    shape.codebooks = 2;
    shape.inputs[0].shape.push_back({2, 2});
    TestClient client = first_channel(streaming);
    channel::Tensor prompt = tensor(client, {1, 2, 3, 4}, 1);
    prompt.dims = {2, 2};
    client.infer(1, "generate", {prompt}, exactly(3));
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

TEST_F(GenerationChannel, ServesManySequencesOfManyChannels) {
    start_ready();
    std::vector<TestClient> clients;
    for (int i = 0; i < 3; ++i) clients.push_back(open_channel(streaming));
    for (std::uint64_t round = 0; round < 5; ++round)
        for (std::size_t i = 0; i < clients.size(); ++i)
            ask(clients[i], round + 1, {std::int64_t(i), std::int64_t(round), 3}, exactly(5 + 7 * i));
    for (std::size_t i = 0; i < clients.size(); ++i) {
        auto heard = listen(clients[i], 5);
        for (std::uint64_t round = 0; round < 5; ++round) {
            const Heard& of = heard[round + 1];
            ASSERT_TRUE(of.last);
            EXPECT_EQ(of.streamed, expected({std::int64_t(i), std::int64_t(round), 3}, 5 + 7 * i));
        }
    }
    const json::object counts = generation();
    EXPECT_EQ(test::number(counts, "tokens"), 5U * (5 + 12 + 19));
    EXPECT_EQ(test::number(counts, "active"), 0U);
    EXPECT_EQ(test::number(counts, "slots"), 4U);
    EXPECT_TRUE(counts.contains("moves") && counts.contains("buckets") && counts.contains("eager"));
}

TEST_F(GenerationChannel, QueuesBeyondTheSlotsByTurnsOfChannels) {
    shape.slots = 1;
    gated = true;
    TestClient many = first_channel();
    TestClient one = open_channel();
    for (std::uint64_t request = 1; request <= 3; ++request) ask(many, request, {1, 2}, exactly(1));
    log->gate.await_arrivals(1);
    await_statistics("queued", 2);
    ask(one, 1, {3, 4}, exactly(1));
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
    TestClient client = first_channel();
    for (std::uint64_t request = 1; request <= 4; ++request) ask(client, request, {1, 2});
    EXPECT_EQ(listen(client, 1)[4].error->code, ErrorCode::queue_full) << "one runs, two wait";
}

TEST_F(GenerationChannel, RunsOtherMethodsBetweenTwoSteps) {
    gated = true;
    TestClient client = first_channel();
    ask(client, 15, {1, 2}, exactly(3));
    log->gate.await_arrivals(1);
    client.infer(2, "echo", {client.tensor({4})});
    await_statistics("in_flight", 2);
    log->gate.let_one_pass();
    client.expect_result(2);  // while the second step is held up
    log->gate.open();
    EXPECT_TRUE(listen(client, 1)[15].last);
}

/// How often this thread has gone to sleep.
long own_sleeps() {
    rusage usage{};
    ::getrusage(RUSAGE_THREAD, &usage);
    return usage.ru_nvcsw;
}

TEST_F(GenerationChannel, ATokenWakesAClientThatWaitsOnce) {
    constexpr int tokens = 20;
    gated = true;
    TestClient client = first_channel(streaming);
    ask(client, 1, {1, 2}, exactly(tokens));
    std::atomic<pid_t> thread{0};
    Heard heard;
    long slept = 0;
    std::thread reader{[&] {
        const long before = own_sleeps();
        thread = test::own_thread();
        heard = listen(client, 1)[1];
        slept = own_sleeps() - before;
    }};
    for (int token = 1; token <= tokens; ++token) {
        log->gate.await_arrivals(token);
        while (thread == 0 || !test::sleeps(thread)) std::this_thread::yield();
        log->gate.let_one_pass();
    }
    log->gate.open();
    reader.join();

    EXPECT_EQ(heard.parts, static_cast<std::size_t>(tokens));
    EXPECT_LE(slept, tokens + 2) << "the answer behind the last token is one of two more";
}

long sleeps_of_other_threads() {
    rusage usage{};
    ::getrusage(RUSAGE_SELF, &usage);
    return usage.ru_nvcsw - own_sleeps();
}

/// Of an engine that computes for a while in each step, so that a thread which a token woke
/// would sleep again.
class GenerationSleeps : public GenerationChannel {
protected:
    GenerationSleeps() {
        lengthen(4096);
        load = [this, plain = load](const config::ModelSpec& model, const LoadContext& context) {
            auto loaded = plain(model, context);
            engine->at_launch = [this] {
                const auto until = Clock::now() + first_step_.exchange(0us) + step_.load();
                while (Clock::now() < until) {
                }
            };
            return loaded;
        };
        client_.emplace(first_channel(streaming));
    }
    std::optional<long> of(int tokens, std::chrono::microseconds step, Clock::duration longest);

    /// Read by the model's thread.
    std::atomic<std::chrono::microseconds> step_{0us}, first_step_{0us};
    std::optional<TestClient> client_;
};

/// How often the worker's threads go to sleep while a sequence of such steps is made. Nothing:
/// never within `longest`.
std::optional<long> GenerationSleeps::of(int tokens, std::chrono::microseconds step, Clock::duration longest) {
    constexpr std::uint64_t attempts = 20;
    step_ = step;
    for (std::uint64_t attempt = 1; attempt <= attempts; ++attempt) {
        const long before = sleeps_of_other_threads();
        const auto begun = Clock::now();
        ask(*client_, attempt, {1, 2}, exactly(tokens));
        EXPECT_EQ(listen(*client_, 1)[attempt].streamed.size(), static_cast<std::size_t>(tokens));
        const auto took = Clock::now() - begun;
        const long slept = sleeps_of_other_threads() - before;
        if (took > longest) continue;
        fmt::print("{} tokens in {} us: the worker's threads slept {} times\n", tokens,
                   std::chrono::duration_cast<std::chrono::microseconds>(took).count(), slept);
        return slept;
    }
    return std::nullopt;
}

TEST_F(GenerationSleeps, ATokenWakesNoThreadOfTheWorker) {
    struct Run {
        const char* name;
        int tokens;
        std::chrono::microseconds step, first_step;
        Clock::duration longest;
    };
    // In a long step the cover runs the loop, and sleeps there while the model's thread sends what
    // it made. While steps are short it looks every 0.5 ms, which is a sleep each time: fewer than
    // half of the tokens, unless the machine is too busy.
    const Run runs[]{{"long steps", 60, 5ms, 0us, test::patience},
                     {"short steps after a long one", 400, 50us, 5ms, test::patience},
                     {"short steps", 400, 50us, 0us, 100 * limits::cover_after}};
    for (const Run& run : runs) {
        SCOPED_TRACE(run.name);
        first_step_ = run.first_step;
        const auto slept = of(run.tokens, run.step, run.longest);
        if (!slept) GTEST_SKIP() << "this machine is too busy: none of the attempts was quick enough to be counted";
        EXPECT_LT(*slept, run.tokens / 2);
    }
}

TEST_F(GenerationChannel, TokensForAClientThatIsAwakeRingNoBellAndAreReadWithoutASleep) {
    TestClient client = first_channel(streaming);
    await_statistics("requests", 0);  // what the worker said on the channel before has been sent
    (void)client.was_rung();
    ask(client, 1, {1, 2}, exactly(24));
    await_statistics("requests", 1);
    await_active(0);

    EXPECT_FALSE(client.was_rung());
    const long before = own_sleeps();
    const Heard heard = listen(client, 1)[1];

    EXPECT_EQ(heard.parts, 24U);
    EXPECT_EQ(own_sleeps(), before);
}

TEST_F(GenerationChannel, GathersTokensForAClientThatReadsSlowly) {
    lengthen(4096);
    TestClient client = first_channel(streaming);
    ask(client, 1, {1, 2}, exactly(4000));
    expect_said("idle");  // it was generated to its end, and nobody has read
    const Heard heard = listen(client, 1)[1];
    ASSERT_TRUE(heard.last);
    EXPECT_EQ(heard.streamed, expected({1, 2}, 4000));
    EXPECT_LT(heard.parts, 2000U);
    EXPECT_EQ(tokens_of(client, heard), heard.streamed);
}

}  // namespace
}  // namespace bulkhead::worker

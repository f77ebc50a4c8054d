#include <atomic>
#include <semaphore>
#include <set>

#include "tests/support/worker/loop_harness.h"
#include "worker/loop/limits.h"

namespace bulkhead::worker::test {
namespace {

using RequestQueue = LoopTest;

TEST_F(RequestQueue, AnswersARunningRequestAtItsDeadlineAndDiscardsItsResult) {
    spec.channel.bytes_max = spec.channel.input_bytes + spec.channel.output_bytes;
    TestClient client = first_channel();
    // Most of the output slab.
    const channel::Tensor input = client.tensor(std::vector<float>(10'000, 1.0F));

    client.infer(1, "wait", {input}, {}, 5ms);
    log->gate.await_arrivals(1);
    EXPECT_NE(client.expect_error(1, ErrorCode::deadline_exceeded).attempt.find("running"), std::string::npos);
    client.infer(2, "echo", {input});
    log->gate.open();

    client.expect_result(2);  // its output fits: the discarded one gave its room back
}

/// Wherever its deadline finds it, each is answered once: with its result, while it waits, or
/// while it runs.
TEST_F(RequestQueue, AnswersEachOfManyWhoseDeadlineIsAMillisecond) {
    constexpr std::uint64_t rounds = 50, at_once = 20;
    log->before_run = [runs = 0](const std::string&) mutable -> Result<> {
        // Until the cover runs the loop.
        const auto until = Clock::now() + limits::cover_looks_every + 2 * limits::cover_after;
        while (runs % 4 == 3 && Clock::now() < until) {
        }
        ++runs;
        return {};
    };
    std::uint64_t results = 0, waited = 0, ran = 0;
    spec.queue_bound = at_once + 1;  // and one that was answered while it runs
    spec.channel.channels_max = 1;  // so that one channel may fill the queue
    TestClient client = first_channel();
    const channel::Tensor input = client.tensor({1});
    for (std::uint64_t round = 0; round < rounds; ++round) {
        std::set<std::uint64_t> unanswered;
        for (std::uint64_t id = round * at_once + 1; id <= (round + 1) * at_once; ++id) {
            client.infer(id, "echo", {input}, {}, 1ms);
            unanswered.insert(id);
        }
        while (!unanswered.empty()) {
            const auto answer = client.receive_answer();
            ASSERT_TRUE(answer);
            if (const auto* failure = std::get_if<channel::Failure>(&*answer)) {
                EXPECT_EQ(failure->error.code, ErrorCode::deadline_exceeded) << failure->error.text();
                EXPECT_EQ(unanswered.erase(failure->request_id), 1U);
                ++(failure->error.attempt.find("running") != std::string::npos ? ran : waited);
            } else {
                ++results;
                const auto& result = std::get<channel::InferResult>(*answer);
                EXPECT_EQ(unanswered.erase(result.request_id), 1U);
                client.send(channel::encode(channel::Release{{result.tensors.at(0).lease}}));
            }
        }
    }
    await_statistics("in_flight", 0);
    EXPECT_GT(results, 0U);
    EXPECT_GT(waited, 0U);
    EXPECT_GT(ran, 0U);
}

TEST_F(RequestQueue, AllButTheModelGoesOnWhileTheModelRuns) {
    constexpr auto deadline = 5ms;
    constexpr std::uint64_t channels = 3;
    TestClient client = first_channel();
    const channel::Tensor input = client.tensor({1});
    client.infer(1, "wait", {input});
    log->gate.await_arrivals(1);

    const auto running_until = Clock::now() + 500ms;
    auto quickest = Clock::duration::max();
    std::uint64_t round = 0;
    for (; Clock::now() < running_until; ++round) {
        const auto asked = Clock::now();
        client.infer(10 * round + 2, "echo", {input}, {}, deadline);
        client.expect_error(10 * round + 2, ErrorCode::deadline_exceeded);
        quickest = std::min(quickest, Clock::now() - asked);
        client.infer(10 * round + 3, "echo", {input});
        client.send(channel::encode(channel::Cancel{10 * round + 3}));
        client.expect_error(10 * round + 3, ErrorCode::cancelled);
        client.infer(10 * round + 4, "unknown", {input});
        const Error unknown = client.expect_error(10 * round + 4, ErrorCode::method_unknown);
        EXPECT_NE(unknown.text().find("\"unknown\"; call one of: echo, wait"), std::string::npos) << unknown.text();
        await_statistics("in_flight", 1);
        if (round >= channels) continue;  // the slabs of a closed channel are unmapped only when
                                          // the model has ended
        TestClient another = open_channel();
        another.close();
    }
    client.send(channel::encode(channel::Cancel{1}));
    client.expect_error(1, ErrorCode::cancelled);
    log->gate.open();

    client.echo(10 * round + 2);
    EXPECT_EQ(log->runs_so_far(), (std::vector<std::string>{"wait 1", "echo 1"}));
    // In the others the machine may be busy.
    EXPECT_LT(quickest, deadline + 10ms) << "of " << round << " rounds";
}

TEST_F(RequestQueue, SixtyFourChannelsTakeTurnsHoweverMuchOneOfThemSends) {
    constexpr std::size_t channels = 64;
    constexpr std::uint64_t of_the_busiest = 12, of_each_other = 2;
    spec.queue_bound = 256;
    spec.channel = {.input_bytes = 4096, .output_bytes = 4096, .bytes_max = 8192, .channels_max = channels};
    start_ready();
    std::vector<TestClient> clients;
    while (clients.size() < channels) clients.push_back(open_channel());
    TestClient& busiest = clients[0];
    busiest.infer(1, "wait", {busiest.tensor({0})});
    log->gate.await_arrivals(1);

    std::size_t sent = 0;
    for (std::size_t i = 0; i < channels; ++i) {
        const channel::Tensor input = clients[i].tensor({static_cast<float>(i)});
        const std::uint64_t count = i == 0 ? of_the_busiest : of_each_other;
        for (std::uint64_t request = 2; request < 2 + count; ++request, ++sent)
            clients[i].infer(request, "echo", {input});
    }
    await_statistics("queued", sent);
    log->gate.open();
    await_statistics("queued", 0);
    await_statistics("in_flight", 0);

    const std::vector<std::string> runs = log->runs_so_far();
    ASSERT_EQ(runs.size(), 1 + sent);
    for (std::size_t turn = 0; turn < of_each_other; ++turn) {
        const auto begin = runs.begin() + static_cast<std::ptrdiff_t>(1 + turn * channels);
        EXPECT_EQ(std::set(begin, begin + channels).size(), channels) << "in turn " << turn;
    }
    EXPECT_EQ(std::count(runs.end() - (of_the_busiest - of_each_other), runs.end(), "echo 0"),
              of_the_busiest - of_each_other);
}

/// None of them waits when the first request runs: its channel floods, and the others ask, while
/// jobs follow one another. If the first job was long, the cover holds the loop and reads as fast
/// as the machine lets it: so one round of ten is enough.
TEST_F(RequestQueue, SixtyThreeChannelsThatAskOnceAreServedAmidAFlood) {
    constexpr std::size_t channels = 64;
    constexpr std::uint64_t flood = 60;
    spec.queue_bound = 256;
    spec.channel = {.input_bytes = 4096, .output_bytes = 8192, .bytes_max = 16384, .channels_max = channels};
    std::vector<TestClient> clients;
    std::uint64_t request = 0;  // the last that channel 0 asked
    std::atomic<bool> floods = false;
    std::binary_semaphore first_asked{0};
    std::binary_semaphore all_asked{0};
    log->before_run = [&](const std::string&) -> Result<> {
        if (!floods.exchange(false)) return {};
        first_asked.acquire();
        for (std::uint64_t i = 0; i < flood; ++i) clients[0].infer(++request, "echo", {clients[0].tensor({0})});
        for (std::size_t i = 1; i < channels; ++i)
            clients[i].infer(request, "echo", {clients[i].tensor({static_cast<float>(i)})});
        all_asked.release();
        return {};
    };
    start_ready();
    while (clients.size() < channels) clients.push_back(open_channel());

    // Between two jobs so many channels are read; the flood's packets are three of these reads.
    constexpr std::ptrdiff_t jobs_max = 1 + (channels + 3) / limits::handlers_between_jobs + 2;
    std::ptrdiff_t least = flood + 1;  // jobs of the flood until the last of the
                                       // others had its turn
    for (int round = 0; round < 10 && least > jobs_max; ++round) {
        const std::size_t before = log->runs_so_far().size();
        const std::uint64_t first = request + 1;
        floods = true;
        clients[0].infer(++request, "echo", {clients[0].tensor({0})});
        first_asked.release();
        all_asked.acquire();
        for (std::size_t i = 1; i < channels; ++i) clients[i].expect_result(request);
        for (std::uint64_t one = first; one <= request; ++one) clients[0].expect_result(one);
        const std::vector<std::string> runs = log->runs_so_far();
        ASSERT_EQ(runs.size() - before, channels + flood);
        const auto begin = runs.begin() + static_cast<std::ptrdiff_t>(before);
        const auto is_other = [](const std::string& run) { return run != "echo 0"; };
        const auto last = std::find_if(runs.rbegin(), runs.rend(), is_other);
        least = std::min(least, std::count(begin, last.base(), "echo 0"));
    }
    EXPECT_LE(least, jobs_max);
}

TEST_F(RequestQueue, WhateverAModelThrowsWhileTheCoverRunsTheLoopFailsItsRequestAlone) {
    log->before_run = [this, waits = 0](const std::string& method) mutable -> Result<> {
        if (method != "wait") return {};
        log->gate.pass();
        if (++waits == 1) throw std::bad_alloc{};
        if (waits == 2) throw std::runtime_error{"its own words"};
        throw 42;
    };
    TestClient client = first_channel();
    const std::vector<std::pair<ErrorCode, std::string>> expected{
        {ErrorCode::out_of_memory, "running method \"wait\""},
        {ErrorCode::inference_failed, "running method \"wait\": its own words"},
        {ErrorCode::inference_failed, "running method \"wait\": it threw something that is not a std::exception"}};
    std::uint64_t request = 0;
    for (const auto& [code, attempt] : expected) {
        client.infer(++request, "wait", {client.tensor({1})});
        log->gate.await_arrivals(static_cast<int>(request));
        await_statistics("in_flight", 1);  // which the cover says
        log->gate.let_one_pass();
        const Error error = client.expect_error(request, code);
        EXPECT_EQ(error.attempt, attempt);
        EXPECT_EQ(error.remedy.starts_with("send it again: "), code == ErrorCode::out_of_memory) << error.remedy;
    }
    await_statistics("out_of_memory", 1);
    client.infer(++request, "echo", {client.tensor({1})});
    client.expect_result(request);
}

TEST_F(RequestQueue, WhatAClientThatIsGoneHadRunningIsAnsweredToNobody) {
    log->before_run = [this](const std::string&) -> Result<> {
        log->gate.pass();
        return Error{ErrorCode::inference_failed, "late", {}};
    };
    TestClient client = first_channel();
    client.infer(1, "wait", {client.tensor({1})});
    log->gate.await_arrivals(1);
    client.close();
    TestClient other = open_channel();  // the loop has seen the end of file by then
    log->gate.open();
    await_statistics("in_flight", 0);

    EXPECT_EQ(number(statistics(), "errors"), 0U);
}

TEST_F(RequestQueue, ReportsAnOverrunOnce) {
    spec.deadlines.request = 5ms;
    TestClient client = first_channel();

    client.infer(1, "wait", {client.tensor({1})}, {}, 1h);
    const Error late = client.expect_error(1, ErrorCode::deadline_exceeded);
    EXPECT_NE(late.attempt.find("its deadline is 5 ms"), std::string::npos) << "not the client's: " << late.attempt;

    const boost::json::object overrun = expect_said("overrun");
    EXPECT_EQ(overrun.at("method").as_string(), "wait");
    EXPECT_EQ(number(overrun, "budget_ms"), 5U);
    EXPECT_GE(number(overrun, "running_ms"), 5U);
    log->gate.open();
    client.infer(2, "echo", {client.tensor({1})});
    expect_said("idle");
    EXPECT_EQ(std::ranges::count(said, "overrun"), 1);
}

}  // namespace
}  // namespace bulkhead::worker::test

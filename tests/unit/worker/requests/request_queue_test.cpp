#include <set>

#include "tests/unit/worker/loop_harness.h"

namespace bulkhead::worker::test {
namespace {

using RequestQueue = LoopTest;

TEST_F(RequestQueue, AnswersARequestWhoseDeadlinePassesInTheQueue) {
    TestClient client = first_channel();
    client.infer(1, "wait", {client.tensor({1})});
    log->gate.await_arrivals(1);

    client.infer(2, "echo", {client.tensor({2}, 64)}, {}, 5ms);

    EXPECT_NE(client.expect_error(2, ErrorCode::deadline_exceeded).attempt.find("waiting"), std::string::npos);
    log->gate.open();
    client.expect_result(1);
    client.infer(3, "echo", {client.tensor({3}, 64)});
    client.expect_result(3);
    EXPECT_EQ(log->runs_so_far(), (std::vector<std::string>{"wait 1", "echo 3"}));
}

TEST_F(RequestQueue, AnswersARunningRequestAtItsDeadlineAndDiscardsItsResult) {
    spec.channel.bytes_max = spec.channel.input_bytes + spec.channel.output_bytes;
    TestClient client = first_channel();
    const channel::Tensor input = client.tensor(std::vector<float>(10'000, 1.0F));  // most of the output slab

    client.infer(1, "wait", {input}, {}, 5ms);
    log->gate.await_arrivals(1);
    EXPECT_NE(client.expect_error(1, ErrorCode::deadline_exceeded).attempt.find("running"), std::string::npos);
    client.infer(2, "echo", {input});
    log->gate.open();

    client.expect_result(2);  // its output fits: the discarded one gave its room back
}

TEST_F(RequestQueue, AClientsDeadlineDoesNotExceedTheModels) {
    spec.deadlines.request = 5ms;
    TestClient client = first_channel();
    client.infer(1, "wait", {client.tensor({1})}, {}, 1h);
    const Error late = client.expect_error(1, ErrorCode::deadline_exceeded);
    EXPECT_NE(late.attempt.find("its deadline is 5 ms"), std::string::npos) << late.attempt;
    log->gate.open();
}

/// Wherever its deadline finds it, each is answered once.
TEST_F(RequestQueue, AnswersEachOfManyWhoseDeadlineIsAMillisecond) {
    constexpr std::uint64_t rounds = 50, at_once = 20;
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
            } else {
                const auto& result = std::get<channel::InferResult>(*answer);
                EXPECT_EQ(unanswered.erase(result.request_id), 1U);
                client.send(channel::encode(channel::Release{{result.tensors.at(0).lease}}));
            }
        }
    }
    await_statistics("in_flight", 0);
}

TEST_F(RequestQueue, AllButTheModelGoesOnWhileTheModelRuns) {
    TestClient client = first_channel();
    const channel::Tensor input = client.tensor({1});
    client.infer(1, "wait", {input});
    log->gate.await_arrivals(1);

    for (std::uint64_t round = 0; round < 3; ++round) {
        client.infer(10 * round + 2, "echo", {input}, {}, 5ms);
        client.expect_error(10 * round + 2, ErrorCode::deadline_exceeded);
        client.infer(10 * round + 3, "echo", {input});
        client.send(channel::encode(channel::Cancel{10 * round + 3}));
        client.expect_error(10 * round + 3, ErrorCode::cancelled);
        client.infer(10 * round + 4, "unknown", {input});
        client.expect_error(10 * round + 4, ErrorCode::method_unknown);
        await_statistics("in_flight", 1);
        TestClient another = open_channel();
        another.close();
    }
    client.send(channel::encode(channel::Cancel{1}));
    client.expect_error(1, ErrorCode::cancelled);
    log->gate.open();

    client.infer(99, "echo", {input});
    client.expect_result(99);
    EXPECT_EQ(log->runs_so_far(), (std::vector<std::string>{"wait 1", "echo 1"}));
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

/// Errs once it may pass the gate.
class FailingLate final : public FakeModel {
public:
    explicit FailingLate(std::shared_ptr<ModelLog> log) : FakeModel{log}, gate_{log->gate} {}
    Result<> run(const config::MethodSpec&, std::span<const TensorView>, const std::vector<config::ParameterValue>&,
                 OutputSink&) override {
        gate_.pass();
        return Error{ErrorCode::inference_failed, "late", {}};
    }

private:
    Gate& gate_;
};

TEST_F(RequestQueue, WhatAClientThatIsGoneHadRunningIsAnsweredToNobody) {
    load = [this](const config::ModelSpec&, const LoadContext&) -> Result<std::unique_ptr<Model>> {
        return std::unique_ptr<Model>{std::make_unique<FailingLate>(log)};
    };
    TestClient client = first_channel();
    client.infer(1, "wait", {client.tensor({1})});
    log->gate.await_arrivals(1);
    client.close();
    TestClient other = open_channel();  // the loop has seen the end of file by then
    log->gate.open();
    await_statistics("in_flight", 0);

    say({{"type", "statistics_asked"}});
    EXPECT_EQ(number(expect_said("statistics"), "errors"), 0U);
}

TEST_F(RequestQueue, ReportsAnOverrunOnce) {
    spec.deadlines.request = 5ms;
    TestClient client = first_channel();

    client.infer(1, "wait", {client.tensor({1})});
    client.expect_error(1, ErrorCode::deadline_exceeded);

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

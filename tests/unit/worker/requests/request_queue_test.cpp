#include "tests/unit/worker/loop_harness.h"

namespace bulkhead::worker::test {
namespace {

using RequestQueue = LoopTest;

TEST_F(RequestQueue, ServesASingleRequestWithinTwoTurnsOfAFlood) {
    spec.queue_bound = 256;
    start_ready();
    TestClient flood = open_channel();
    TestClient single = open_channel();
    flood.infer(1, "wait", {flood.tensor({1})});
    log->gate.await_arrivals(1);
    for (std::uint64_t id = 2; id <= 64; ++id) flood.infer(id, "echo", {flood.tensor({2}, 64)});
    single.infer(1, "echo", {single.tensor({99})});
    await_statistics("queued", 64);

    log->gate.open();
    single.expect_result(1);
    for (std::uint64_t id = 1; id <= 64; ++id) flood.expect_result(id);

    const auto runs = log->runs_so_far();
    const auto turn = std::ranges::find(runs, "echo 99") - runs.begin();
    EXPECT_LE(turn, 2);
}

TEST_F(RequestQueue, RefusesWhatExceedsTheQueueAndNamesTheBound) {
    spec.queue_bound = 2;
    start_ready();
    TestClient one = open_channel();
    TestClient two = open_channel();
    TestClient three = open_channel();
    one.infer(1, "wait", {one.tensor({1})});
    log->gate.await_arrivals(1);
    two.infer(1, "echo", {two.tensor({1})});
    await_statistics("queued", 1);

    three.infer(1, "echo", {three.tensor({1})});
    two.infer(2, "echo", {two.tensor({1}, 64)});

    EXPECT_NE(three.expect_error(1, ErrorCode::queue_full).text().find("`queue`"), std::string::npos);
    EXPECT_NE(two.expect_error(2, ErrorCode::queue_full).text().find("`queue`"), std::string::npos);
    log->gate.open();
    one.expect_result(1);
    two.expect_result(1);
    three.infer(2, "echo", {three.tensor({1})});
    three.expect_result(2);
}

TEST_F(RequestQueue, AnswersARequestWhoseDeadlinePassesInTheQueue) {
    start_ready();
    TestClient client = open_channel();
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
    start_ready();
    TestClient client = open_channel();
    const channel::Tensor input = client.tensor(std::vector<float>(10'000, 1.0F));  // most of the output slab

    client.infer(1, "wait", {input}, {}, 5ms);
    log->gate.await_arrivals(1);
    EXPECT_NE(client.expect_error(1, ErrorCode::deadline_exceeded).attempt.find("running"), std::string::npos);
    client.infer(2, "echo", {input});
    log->gate.open();

    client.expect_result(2);  // its output fits: the discarded one gave its room back
}

TEST_F(RequestQueue, CancelsAQueuedAndARunningRequest) {
    start_ready();
    TestClient client = open_channel();
    client.infer(1, "wait", {client.tensor({1})});
    log->gate.await_arrivals(1);
    client.infer(2, "echo", {client.tensor({2}, 64)});

    client.send(channel::encode(channel::Cancel{2}));
    client.send(channel::encode(channel::Cancel{1}));
    client.send(channel::encode(channel::Cancel{1}));
    client.send(channel::encode(channel::Cancel{99}));

    client.expect_error(2, ErrorCode::cancelled);
    client.expect_error(1, ErrorCode::cancelled);
    client.infer(1, "echo", {client.tensor({3}, 128)});  // the number is free again
    log->gate.open();
    client.expect_result(1);
    EXPECT_EQ(log->runs_so_far(), (std::vector<std::string>{"wait 1", "echo 3"}));
}

TEST_F(RequestQueue, ReportsAnOverrunOnce) {
    spec.deadlines.request = 5ms;
    start_ready();
    TestClient client = open_channel();

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

/// What ends a sequence before its last token: its client, its time, its model, the worker's drain.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/unit/worker/generation_channel_fixture.h"

namespace bulkhead::worker {
namespace {

namespace json = boost::json;
using test::Heard;
using test::streaming;
using test::TestClient;
using testing::AllOf;
using testing::HasSubstr;
using namespace std::chrono_literals;

using GenerationEnds = test::GenerationChannel;

TEST_F(GenerationEnds, CancelsBeforeTheNextStepAndSendsNoTokenBehindThatAnswer) {
    gated = true;
    TestClient client = first_channel(streaming);
    ask(client, 1, {1, 2, 3});
    log->gate.await_arrivals(1);
    log->gate.let_one_pass();
    log->gate.await_arrivals(2);  // the token of the first step is read behind the
                                  // launch of the second
    client.send(channel::encode(channel::Cancel{1}));
    const auto error = listen(client, 1)[1].error;
    ASSERT_TRUE(error);
    EXPECT_EQ(error->code, ErrorCode::cancelled);
    log->gate.let_one_pass();
    await_active(0);  // though no third step was let through
    log->gate.open();
    ask(client, 2, {1, 2, 3}, exactly(2));
    EXPECT_FALSE(listen(client, 1).contains(1));
}

TEST_F(GenerationEnds, FreesTheSlotOfAClientThatIsGone) {
    shape.slots = 1;
    shape.length = 1 << 18;  // which the sequence would take minutes to fill
    gated = true;
    TestClient gone = first_channel(streaming);
    ask(gone, 1, {1, 2, 3}, {{"ignore_stop", true}});
    log->gate.await_arrivals(1);
    gone.close();
    log->gate.open();
    expect_said("channel_closed");
    await_active(0);
    TestClient next = open_channel();
    ask(next, 1, {1, 2, 3}, exactly(4));
    Heard heard = listen(next, 1)[1];
    EXPECT_EQ(tokens_of(next, heard), expected({1, 2, 3}, 4));
}

TEST_F(GenerationEnds, EndsTheStreamOfAClientThatStopsReading) {
    unread_stream = 30ms;
    lengthen(1 << 18);
    TestClient client = first_channel(streaming);
    ask(client, 1, {1, 2}, {{"ignore_stop", true}});
    await_statistics("requests", 1);
    await_active(0);
    const Heard heard = listen(client, 1)[1];
    ASSERT_TRUE(heard.error);
    EXPECT_EQ(heard.error->code, ErrorCode::cancelled);
    EXPECT_THAT(heard.error->attempt, HasSubstr("took no part of the stream"));
    EXPECT_GT(heard.parts, 0U);
    ask(client, 2, {1, 2}, exactly(3));
    EXPECT_EQ(listen(client, 1)[2].streamed, expected({1, 2}, 3));
}

TEST_F(GenerationEnds, WhateverAStepThrowsEndsItsSequencesAlone) {
    load = [this, plain = load](const config::ModelSpec& model, const LoadContext& context) {
        auto loaded = plain(model, context);
        engine->at_launch = [steps = 0]() mutable {
            if (++steps == 1) throw std::bad_alloc{};
            if (steps == 2) throw std::runtime_error{"its own words"};
            if (steps == 3) throw 42;
        };
        return loaded;
    };
    TestClient client = first_channel(streaming);
    std::uint64_t request = 0;
    for (const char* attempt : {"making a step", "making a step: its own words",
                                "making a step: it threw something that is not a std::exception"}) {
        ask(client, ++request, {1, 2});
        const Heard heard = listen(client, 1)[request];
        ASSERT_TRUE(heard.error);
        EXPECT_EQ(heard.error->attempt, attempt);
        await_statistics("out_of_memory", 1);
    }
    ask(client, ++request, {1, 2}, exactly(3));
    EXPECT_EQ(listen(client, 1)[request].streamed, expected({1, 2}, 3));
}

TEST_F(GenerationEnds, EndsWhatIsOutOfTimeRunningOrWaiting) {
    shape.slots = 1;
    gated = true;
    TestClient client = first_channel();
    ask(client, 1, {1, 2}, {}, 30ms);
    log->gate.await_arrivals(1);
    ask(client, 2, {1, 2}, {}, 30ms);
    auto heard = listen(client, 2);
    EXPECT_THAT(heard[1].error->text(), AllOf(HasSubstr("deadline_exceeded"), HasSubstr("not complete")));
    EXPECT_THAT(heard[2].error->text(), AllOf(HasSubstr("deadline_exceeded"), HasSubstr("waiting")));
    log->gate.let_one_pass();
    await_active(0);
}

TEST_F(GenerationEnds, SaysWhenOneStepExceedsTheModelsDeadline) {
    spec.deadlines.request = 20ms;
    gated = true;
    TestClient client = first_channel();
    ask(client, 1, {1, 2});
    const json::object overrun = expect_said("overrun");
    EXPECT_EQ(overrun.at("method").as_string(), "generate");
    EXPECT_GE(test::number(overrun, "running_ms"), 20U);
}

TEST_F(GenerationEnds, LetsASequenceTakeLongerThanAStepMay) {
    spec.deadlines.request = 30ms;
    lengthen(4096);
    spec.channel.input_bytes = 256 * 1024;
    TestClient client = first_channel();
    ask(client, 1, {1, 2}, exactly(4000));
    EXPECT_TRUE(listen(client, 1)[1].last);
    EXPECT_THAT(said, testing::Not(testing::Contains("overrun")));
}

TEST_F(GenerationEnds, FinishesSequencesBeforeItIsDrained) {
    gated = true;
    TestClient client = first_channel(streaming);
    ask(client, 1, {1, 2}, exactly(6));
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

TEST_F(GenerationEnds, EndsSequencesWhenTheDrainTakesTooLong) {
    gated = true;
    TestClient client = first_channel(streaming);
    ask(client, 1, {1, 2});
    log->gate.await_arrivals(1);
    say({{"type", "drain"}, {"deadline_ms", 50}});
    EXPECT_TRUE(std::holds_alternative<channel::Closing>(*client.receive_answer()));
    client.expect_error(1, ErrorCode::worker_draining);
    EXPECT_EQ(expect_exit(), 1);
}

}  // namespace
}  // namespace bulkhead::worker

/// What a worker says of itself while supervisors come and go.

#include <sys/socket.h>

#include "tests/support/worker/loop_harness.h"
#include "tests/support/worker/page_reader.h"

namespace bulkhead::worker::test {
namespace {

using WorkerState = LoopTest;

TEST_F(WorkerState, BringsItsPageAndItsEndOfEachChannelWithAHello) {
    page = StatusPage::make().value();
    start_ready();
    std::vector<TestClient> clients;
    for (int i = 0; i < 3; ++i) clients.push_back(open_channel());

    say({{"type", "hello_asked"}, {"nonce", 1}});
    const boost::json::object again = expect_said("hello");

    EXPECT_TRUE(hello.at("page").as_bool());
    EXPECT_TRUE(again.at("page").as_bool());
    ASSERT_EQ(brought.size(), 4U);
    const SeenPage seen = page_seen(brought[0].get());
    EXPECT_EQ(seen.magic_number, worker_page::magic);
    // As a supervisor does when it sees a death: each client has its end of file.
    ASSERT_EQ(again.at("channels").as_array().size(), 3U);
    for (std::size_t i = 0; i < clients.size(); ++i) {
        EXPECT_EQ(again.at("channels").at(i).to_number<std::uint64_t>(), clients[i].id);
        ASSERT_EQ(::shutdown(brought[i + 1].get(), SHUT_RDWR), 0);
        clients[i].expect_end();
    }
}

TEST_F(WorkerState, ListsMoreChannelsThanOnePacketMayBringDescriptorsOf) {
    page = StatusPage::make().value();
    spec.channel = {.input_bytes = 4096, .output_bytes = 4096, .bytes_max = 1u << 20, .channels_max = 300};
    start_ready();
    std::vector<TestClient> clients;
    for (int i = 0; i < 260; ++i) clients.push_back(open_channel());

    say({{"type", "hello_asked"}, {"nonce", 1}});

    EXPECT_EQ(expect_said("hello").at("channels").as_array().size(), 260U);
    EXPECT_EQ(brought.size(), packet_fds_kernel_max);
}

TEST_F(WorkerState, TellsWhereALoadIs) {
    Gate capture;
    load = [&](const config::ModelSpec&, const LoadContext& context) -> Result<std::unique_ptr<Model>> {
        if (Result<> granted = context.wait_for_grant(12345); !granted) return granted.error();
        context.progress("capturing", 0, 2, "steps", "forward");
        capture.pass();
        return std::unique_ptr<Model>{std::make_unique<FakeModel>(log)};
    };
    const auto state = [this](std::uint64_t nonce) {
        say({{"type", "hello_asked"}, {"nonce", nonce}});
        return boost::json::serialize(expect_said("hello").at("state"));
    };
    page = StatusPage::make().value();
    start();
    EXPECT_EQ(state(1), R"({"configured":false,"phase":"starting","in_flight":0,"grant":"none"})");

    configure();
    EXPECT_EQ(number(expect_said("grant_asked"), "device_bytes"), 12345U);
    EXPECT_EQ(state(2), R"({"configured":true,"phase":"loading","in_flight":0,"grant":"asked"})");

    say({{"type", "grant"}});
    capture.await_arrivals(1);
    EXPECT_EQ(state(3), R"({"configured":true,"phase":"capturing","in_flight":0,"grant":"given"})");
    const SeenPage seen = page_seen(page->fd());
    EXPECT_STREQ(seen.request.data(), "capturing forward");
    EXPECT_NE(seen.running_since_ns, 0U);

    capture.open();
    expect_said("ready");
    EXPECT_EQ(state(4), R"({"configured":true,"phase":"ready","in_flight":0,"grant":"given"})");
    EXPECT_EQ(page_seen(page->fd()).running_since_ns, 0U);
}

TEST_F(WorkerState, ItsPageTellsWhatRuns) {
    page = StatusPage::make().value();
    TestClient client = first_channel();
    const std::uint64_t steps = page_seen(page->fd()).steps;
    client.infer(1, "wait", {client.tensor({1, 2, 3})});
    log->gate.await_arrivals(1);

    const SeenPage during = page_seen(page->fd());
    log->gate.open();
    client.expect_result(1);
    const SeenPage after = page_seen(page->fd());

    EXPECT_STREQ(during.request.data(), "wait(x float32[3])");
    EXPECT_NE(during.running_since_ns, 0U);
    EXPECT_LE(during.running_since_ns, static_cast<std::uint64_t>(Clock::now().time_since_epoch().count()));
    EXPECT_EQ(during.steps, steps);
    EXPECT_EQ(after.steps, steps + 1);
    EXPECT_EQ(after.running_since_ns, 0U);
    EXPECT_STREQ(after.request.data(), "wait(x float32[3])") << "what ran last";
}

// --- nobody reads the link

TEST_F(WorkerState, ServesOnWhenNobodyReadsTheLinkAndAnswersTheLastQuestionThen) {
    start_ready();
    // Far more than socket and outbox hold.
    for (int i = 0; i < 3'000; ++i) say({{"type", "statistics_asked"}});

    TestClient client = open_channel();  // behind them all
    client.echo(1);

    boost::json::object last;
    do last = expect_said("statistics");
    while (!last.empty() && number(last, "requests") == 0);

    EXPECT_EQ(number(last, "requests"), 1U) << "what was owed is told as of now";
    EXPECT_LT(std::ranges::count(said, "statistics"), 500);
}

TEST_F(WorkerState, EndsADrainThoughNobodyReadsTheLink) {
    start_ready();
    for (int i = 0; i < 3'000; ++i) say({{"type", "statistics_asked"}});
    // The worker reports each of them: the socket is full to the brim.
    for (int i = 0; i < 400; ++i) introduce();

    say({{"type", "drain"}, {"deadline_ms", 20'000}});

    EXPECT_EQ(expect_exit(), 0);
}

}  // namespace
}  // namespace bulkhead::worker::test

#include "worker/requests/scheduler.h"

#include <gtest/gtest.h>

namespace bulkhead::worker {
namespace {

using namespace std::chrono_literals;

constexpr Clock::time_point start{};

using Order = std::vector<std::pair<std::uint64_t, std::uint64_t>>;

/// The requests that were let go, and of them those that got an error first.
class Sender final : public Requester {
public:
    void completed(const PendingRequest&, Completion) override {}
    void failed(const PendingRequest& request, const Error&) override { failed_.emplace_back(request.channel, request.id); }
    void let_go(const PendingRequest& request) override { ended_.emplace_back(request.channel, request.id); }
    Order failed_, ended_;
};

const std::shared_ptr<Sender> sender = std::make_shared<Sender>();
const config::MethodSpec method;

Result<> push(Scheduler& scheduler, std::uint64_t channel, std::uint64_t id, Clock::time_point deadline = start + 1h,
              std::size_t running = 0) {
    RequestPtr request = std::make_unique<PendingRequest>();
    request->channel = channel;
    request->id = id;
    request->deadline = deadline;
    request->requester = sender;
    request->method = &method;
    return scheduler.push(request, running);
}

Order order_of(Scheduler& scheduler) {
    Order order;
    while (const auto request = scheduler.next()) order.emplace_back(request->channel, request->id);
    return order;
}

TEST(Scheduler, GivesChannelsTurns) {
    Scheduler scheduler{16};
    for (const std::uint64_t id : {1, 2, 3}) ASSERT_TRUE(push(scheduler, 10, id));
    for (const std::uint64_t id : {1, 2}) ASSERT_TRUE(push(scheduler, 20, id));
    ASSERT_TRUE(push(scheduler, 30, 1));

    EXPECT_EQ(order_of(scheduler), (Order{{10, 1}, {20, 1}, {30, 1}, {10, 2}, {20, 2}, {10, 3}}));
    EXPECT_EQ(scheduler.size(), 0U);
}

TEST(Scheduler, CountsRunningAndWaitingAgainstTheBound) {
    Scheduler scheduler{2};
    ASSERT_TRUE(push(scheduler, 1, 1, start + 1h, 1));

    const Result<> refused = push(scheduler, 1, 2, start + 1h, 1);

    ASSERT_FALSE(refused);
    EXPECT_EQ(refused.error().code, ErrorCode::queue_full);
    EXPECT_NE(refused.error().text().find("`queue`"), std::string::npos);
    EXPECT_EQ(scheduler.size(), 1U);
}

TEST(Scheduler, EndsARequestOrAChannelAndKeepsTheOrderOfTheRest) {
    *sender = {};
    Scheduler scheduler{8};
    for (const std::uint64_t id : {5, 2, 3}) ASSERT_TRUE(push(scheduler, 1, id));
    for (const std::uint64_t id : {2, 1}) ASSERT_TRUE(push(scheduler, 2, id));

    EXPECT_EQ(scheduler.fail(1, 2, {}), 1U);
    EXPECT_EQ(scheduler.fail(1, 2, {}), 0U);
    EXPECT_EQ(scheduler.fail(9, 1, {}), 0U);
    EXPECT_EQ(scheduler.drop(2), 2U);
    EXPECT_EQ(scheduler.drop(2), 0U);

    EXPECT_EQ(sender->failed_, (Order{{1, 2}}));
    EXPECT_EQ(sender->ended_, (Order{{1, 2}, {2, 2}, {2, 1}}));
    EXPECT_EQ(order_of(scheduler), (Order{{1, 5}, {1, 3}}));
}

TEST(Scheduler, FailsWhatIsOutOfTimeAndKnowsTheNextDeadline) {
    *sender = {};
    Scheduler scheduler{8};
    ASSERT_TRUE(push(scheduler, 1, 1, start + 30ms));
    ASSERT_TRUE(push(scheduler, 1, 2, start + 10ms));
    ASSERT_TRUE(push(scheduler, 2, 1, start + 20ms));
    EXPECT_EQ(scheduler.earliest_deadline(), start + 10ms);

    EXPECT_EQ(scheduler.fail_expired(start + 20ms, "give it longer"), 2U);
    EXPECT_EQ(sender->failed_, (Order{{1, 2}, {2, 1}}));
    EXPECT_EQ(sender->ended_, sender->failed_);

    EXPECT_EQ(scheduler.earliest_deadline(), start + 30ms);
    EXPECT_EQ(order_of(scheduler), (Order{{1, 1}}));
    EXPECT_EQ(scheduler.earliest_deadline(), never);
}

}  // namespace
}  // namespace bulkhead::worker

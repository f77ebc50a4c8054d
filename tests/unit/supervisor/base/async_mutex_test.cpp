#include "supervisor/base/async_mutex.h"

#include <vector>

#include <gtest/gtest.h>

namespace bulkhead::supervisor {
namespace {

using State = AsyncMutex::Lock::State;

class AsyncMutexTest : public testing::Test {
protected:
    void run() {
        io_.restart();
        io_.run();
    }
    void take(std::size_t turn) {
        turns_[turn].take(mutex_, [this, turn] { held_.push_back(turn); });
    }

    boost::asio::io_context io_;
    AsyncMutex mutex_{io_};
    std::vector<AsyncMutex::Lock> turns_{4};
    std::vector<std::size_t> held_;
};

TEST_F(AsyncMutexTest, IsHeldInTheOrderOfAsking) {
    for (const std::size_t turn : {2U, 0U, 1U}) take(turn);
    EXPECT_EQ(held_.size(), 0U) << "never within the call";
    run();
    EXPECT_EQ(held_, (std::vector<std::size_t>{2}));
    EXPECT_EQ(turns_[0].state(), State::waiting);
    turns_[2].end();
    run();
    turns_[0].end();
    run();
    EXPECT_EQ(held_, (std::vector<std::size_t>{2, 0, 1}));
    EXPECT_EQ(turns_[1].state(), State::held);
    EXPECT_EQ(turns_[0].state(), State::none);
}

TEST_F(AsyncMutexTest, WhoEndsItsWaitIsPassedOver) {
    for (const std::size_t turn : {0U, 1U, 2U}) take(turn);
    turns_[1].end();
    turns_[0].end();  // before it was told
    run();
    EXPECT_EQ(held_, (std::vector<std::size_t>{2}));
}

TEST_F(AsyncMutexTest, WhoAsksAgainWaitsBehindTheOthers) {
    for (const std::size_t turn : {0U, 1U}) take(turn);
    run();
    take(0);  // has it
    turns_[0].end();
    take(0);
    run();
    turns_[1].end();
    run();
    EXPECT_EQ(held_, (std::vector<std::size_t>{0, 1, 0}));
}

}  // namespace
}  // namespace bulkhead::supervisor

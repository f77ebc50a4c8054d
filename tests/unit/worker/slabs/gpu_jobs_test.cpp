#include "worker/slabs/gpu_jobs.h"

#include <boost/asio/steady_timer.hpp>
#include <gmock/gmock.h>

#include "tests/support/worker/loop_harness.h"
#include "tests/support/worker/page_reader.h"

namespace bulkhead::worker {
namespace {

using namespace std::chrono_literals;

/// The executor runs until nothing is left to do, a deadline included.
class GpuJobsTest : public testing::Test {
protected:
    void with_deadline(std::chrono::milliseconds deadline) {
        jobs.emplace(io, executor, page.get(), deadline, [this](const Error& error) {
            stuck.push_back(error);
            gate.open();
        });
    }
    static Executor::Then nothing() {
        return [] {};
    }

    std::unique_ptr<StatusPage> page = StatusPage::make().value();
    test::Gate gate;
    std::vector<Error> stuck;
    boost::asio::io_context io;
    std::optional<GpuJobs> jobs;
    Executor executor{io};  // ends first
};

TEST_F(GpuJobsTest, OneThatRunsForTheDeadlineIsToldOnceByItsName) {
    with_deadline(20ms);
    test::SeenPage seen{};
    jobs->post("freeing slabs of channel 3", [&] {
        seen = test::page_seen(page->fd());
        gate.pass();
        return nothing();
    });
    jobs->post("freeing slabs of channel 4", nothing);

    executor.run();

    ASSERT_EQ(stuck.size(), 1U);
    EXPECT_EQ(stuck[0].code, ErrorCode::deadline_exceeded);
    EXPECT_THAT(stuck[0].attempt, testing::StartsWith("freeing slabs of channel 3 waits for the GPU for "));
    EXPECT_STREQ(seen.request.data(), "freeing slabs of channel 3");
    EXPECT_NE(seen.running_since_ns, 0U);
    executor.stop();  // awaits the job
    EXPECT_EQ(test::page_seen(page->fd()).running_since_ns, 0U);
}

TEST_F(GpuJobsTest, OneThatWaitsBehindALongRequestIsNotTold) {
    with_deadline(20ms);
    executor.post([&] {
        gate.pass();
        return nothing();
    });
    jobs->post("making a slab of channel 3", nothing);
    boost::asio::steady_timer request_ends{io, 5 * 20ms};
    request_ends.async_wait(HandlerLock::of(io).wrap([&](boost::system::error_code) { gate.open(); }));

    executor.run();

    EXPECT_TRUE(stuck.empty());
}

TEST_F(GpuJobsTest, OnceTheyHaveEndedNoDeadlineIsLeft) {
    with_deadline(1h);
    for (int i = 0; i < 3; ++i) jobs->post("freeing slabs of channel 3", nothing);

    executor.run();  // else for an hour

    EXPECT_TRUE(stuck.empty());
}

}  // namespace
}  // namespace bulkhead::worker

/// What the kernel does not answer holds up nobody but who asked, and that one not for ever.

#include "supervisor/base/blocking_queue.h"

#include <signal.h>

#include <atomic>
#include <future>
#include <vector>

#include <gmock/gmock.h>

#include "supervisor/base/proc_files.h"
#include "supervisor/reclaim/reclamation.h"
#include "tests/unit/supervisor/replica_fixture.h"

namespace bulkhead::supervisor {
namespace {

using namespace std::chrono_literals;
constexpr auto deadline = 500ms;  ///< a job that waits for nothing is done long before, on a
                                  ///< busy machine too

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

/// Jobs that wait in it do so until it opens.
class JobGate {
public:
    ~JobGate() { open(); }
    void open() {
        if (!std::exchange(opened_, true)) go_.set_value();
    }
    auto job() {
        return [go = opening_, running = running_] {
            ++*running;
            go.wait();
            --*running;
            return 1;
        };
    }
    [[nodiscard]] int running() const { return *running_; }

private:
    std::promise<void> go_;
    std::shared_future<void> opening_ = go_.get_future().share();
    bool opened_ = false;
    std::shared_ptr<std::atomic<int>> running_ = std::make_shared<std::atomic<int>>(0);
};

class BlockingQueueTest : public testing::Test {
protected:
    bool wait(const std::function<bool()>& done) { return test::run_until(io_, done); }
    auto note(int number) {
        return [this, number](const Result<int>& result) { answers_.push_back(result ? number : -number); };
    }

    /// A job that waits for nothing, and answers with its number.
    void count(BlockingQueue& blocking, int number) {
        blocking.run(
            "counting", [number] { return number; }, note(number));
    }

    boost::asio::io_context io_;
    std::vector<int> answers_;
};

TEST_F(BlockingQueueTest, JobsRunInOrderAndAnswerLater) {
    BlockingQueue blocking{io_};
    std::vector<int> ran;  // on one thread alone
    for (const int number : {1, 2, 3})
        blocking.run(
            "counting", [&ran, number] { return ran.push_back(number), number; }, note(number));
    EXPECT_THAT(answers_, ElementsAre());
    ASSERT_TRUE(wait([&] { return answers_.size() == 3; }));
    EXPECT_THAT(answers_, ElementsAre(1, 2, 3));
    EXPECT_THAT(ran, ElementsAre(1, 2, 3));
    EXPECT_TRUE(blocking.end());
}

TEST_F(BlockingQueueTest, AStuckJobIsANamedErrorAndThoseBehindItRun) {
    JobGate gate;
    BlockingQueue blocking{io_, deadline};
    std::vector<Error> errors;
    const auto captured = std::make_shared<int>(0);
    blocking.run(
        "reading the disk", [job = gate.job(), captured] { return job(); },
        [&](const Result<int>& result) { errors.push_back(result.error()); });
    count(blocking, 2);
    ASSERT_TRUE(wait([&] { return !answers_.empty(); }));

    ASSERT_EQ(errors.size(), 1U);
    EXPECT_EQ(errors[0].code, ErrorCode::deadline_exceeded);
    EXPECT_EQ(errors[0].attempt, "reading the disk: no end within 500 ms");
    EXPECT_THAT(errors[0].remedy, AllOf(HasSubstr("/proc/"), HasSubstr("/stack")));
    EXPECT_THAT(answers_, ElementsAre(2));
    EXPECT_FALSE(blocking.end()) << "its thread has not come back";
    EXPECT_GT(captured.use_count(), 1) << "its job still uses it";

    gate.open();
    ASSERT_TRUE(wait([&] { return captured.use_count() == 1; }));
    EXPECT_TRUE(wait([&] { return blocking.end(); }));
    EXPECT_EQ(errors.size(), 1U) << "what comes back too late answers nobody again";
}

TEST_F(BlockingQueueTest, StuckThreadsAreBoundedAndOneThatComesBackMakesRoom) {
    JobGate gate;
    constexpr int max = 3;
    BlockingQueue blocking{io_, deadline, max};
    for (int number = 1; number <= max; ++number) blocking.run("reading the disk", gate.job(), note(number));
    std::optional<Error> refused;
    for (const char* when : {"it waited behind them", "none is left"}) {
        refused.reset();
        blocking.run(
            "counting", [] { return 1; }, [&](const Result<int>& result) { refused = result.error(); });
        EXPECT_FALSE(refused) << "answered later, as all others are";
        ASSERT_TRUE(wait([&] { return refused.has_value(); }));
        EXPECT_EQ(refused->code, ErrorCode::resources_exhausted) << when;
        EXPECT_THAT(refused->attempt, HasSubstr("counting: no thread can run it"));
        EXPECT_EQ(gate.running(), max);
        EXPECT_EQ(answers_.size(), static_cast<std::size_t>(max));
    }
    EXPECT_EQ(blocking.waiting(), 0U);

    gate.open();
    answers_.clear();
    const auto counts = [&] {
        if (blocking.waiting() == 0) count(blocking, 1);
        return std::ranges::find(answers_, 1) != answers_.end();
    };
    EXPECT_TRUE(wait(counts));
}

TEST_F(BlockingQueueTest, ItsEndDropsWhatWaitsAndDoesNotWaitForEver) {
    JobGate gate;
    const auto captured = std::make_shared<int>(0);
    {
        BlockingQueue blocking{io_, deadline};
        blocking.run("reading the disk", gate.job(), note(1));
        blocking.run(
            "counting", [captured] { return 2; }, note(2));
        ASSERT_TRUE(wait([&] { return gate.running() == 1; }));
        EXPECT_FALSE(blocking.end());
    }
    EXPECT_THAT(answers_, testing::Not(testing::Contains(2)));
    gate.open();
    EXPECT_TRUE(wait([&] { return gate.running() == 0; }));
}

TEST_F(BlockingQueueTest, ItsEndWaitsNoLongerThanWhoEndsItWants) {
    JobGate gate;
    BlockingQueue blocking{io_, 1h};
    blocking.run("reading ahead", gate.job(), note(1));
    ASSERT_TRUE(wait([&] { return gate.running() == 1; }));
    EXPECT_FALSE(blocking.end(1ms));
    gate.open();
    EXPECT_TRUE(wait([&] { return blocking.end(); }));
}

/// A replica whose every look at a disk or at /proc is refused, once `stuck` was called.
class StuckReplicaTest : public test::ReplicaTest {
protected:
    StuckReplicaTest() : ReplicaTest{3s, 1} {}
    void stuck() {
        bool given_up = false;
        blocking_.run("reading the disk", gate_.job(), [&](const Result<int>&) { given_up = true; });
        ASSERT_TRUE(wait([&] { return given_up; }));
    }
    ~StuckReplicaTest() override {
        gate_.open();
        EXPECT_TRUE(wait([&] { return blocking_.end(); })) << "what the job was given lives until it is back";
    }
    JobGate gate_;
};

TEST_F(StuckReplicaTest, AFileThatDoesNotAnswerFailsTheLoadByName) {
    stuck();
    load();
    ASSERT_TRUE(wait([&] { return !loads_.empty(); }));
    ASSERT_FALSE(loads_[0]);
    EXPECT_EQ(loads_[0].error().code, ErrorCode::resources_exhausted);
    EXPECT_THAT(loads_[0].error().attempt, AllOf(HasSubstr("loading m/0"), HasSubstr("looking at")));
    wait_for(WorkerState::stopped);
    for (const auto& worker : keeper_.workers) EXPECT_TRUE(worker->got_signal(SIGKILL));
}

TEST_F(StuckReplicaTest, AReceiptComesAndClaimsNothing) {
    test::FakeWorker& worker = ready();
    stuck();
    unload();
    ASSERT_TRUE(wait([&] { return worker.got("drain"); }));
    worker.say({{"type", "drained"}});
    keeper_.exit(worker, {false, 0, true});
    EXPECT_EQ(receipt().ended, Ended::drained);
    EXPECT_FALSE(receipt().verified);
    EXPECT_EQ(replica().state(), WorkerState::stopped);
}

TEST(ProcessBeingRead, IsLeftOutByOthersAndAReceiptIsThenNotVerified) {
    Gpus gpus;
    const Trace trace{{"m", 0, 1}, 5'000'000, true, "blocking_queue_test:none", "bulkhead:none:", "", {}, false};
    EXPECT_TRUE(look_for_remains(trace, gpus).saw_all);
    {
        const ProcessBeingRead stuck{::getpid()};
        EXPECT_TRUE(stuck);
        EXPECT_TRUE(is_being_read(::getpid()));
        EXPECT_EQ(read_proc_file(::getpid(), "maps", 1 << 20), std::nullopt);
        EXPECT_TRUE(read_proc_file(::getpid(), "stat", 4096)) << "that is answered whatever hangs";
        const Remains remains = look_for_remains(trace, gpus);
        EXPECT_FALSE(remains.saw_all);
    }
    EXPECT_FALSE(is_being_read(::getpid()));
    EXPECT_TRUE(read_proc_file(::getpid(), "maps", 1 << 20));
}

}  // namespace
}  // namespace bulkhead::supervisor

/// What a GPU's driver says of the memory of a worker that is gone, and what is waited for. How
/// processes and slabs are found: proc_files_test.cpp.

#include "supervisor/reclaim/reclamation.h"

#include <unistd.h>

#include <fmt/format.h>
#include <gmock/gmock.h>

#include "ipc/slab/host_slab.h"
#include "supervisor/base/limits.h"
#include "tests/unit/supervisor/fake_gpus.h"
#include "tests/unit/supervisor/loop.h"
#include "tests/unit/supervisor/marked_process.h"

namespace bulkhead::supervisor {
namespace {

using test::MarkedProcess;

constexpr std::uint64_t total = 80'000'000'000;
constexpr std::uint64_t had = 6'000'000'000;
const std::string gpu_line = fmt::format("gpu GPU-a {} Fake\n", total);

class GpuReclamation : public testing::Test {
protected:
    /// One line of the machine; `how` says what becomes of the memory when the process is dead.
    static std::string process(pid_t pid, std::uint64_t bytes, const std::string& how = {}) {
        return fmt::format("process 0 {} {} {}\n", pid, bytes, how);
    }
    void machine(const std::string& processes) { fake_.set(gpu_line + processes); }

    /// What was sampled of the worker before its end was asked for.
    void sample() {
        const auto gpu = gpus_.read("GPU-a");
        ASSERT_TRUE(gpu);
        trace_.gpu = share_of(*gpu, worker_.pid(), trace_.marker);
        trace_.gpu_is_recent = true;
        free_before_ = gpu->free_bytes;
    }
    void end_worker() {
        worker_.kill();
        worker_.wait();
    }
    void start() {
        verify_reclamation(io_, blocking_, gpus_, trace_, true,
                           [this](Remains remains) { done_ = std::move(remains); });
    }
    /// What was sampled of a worker of this machine, which has ended since.
    void leave(const std::string& processes) {
        machine(processes);
        sample();
        end_worker();
    }
    void reclaim(const std::string& processes) {
        leave(processes);
        start();
    }
    /// Lets some looks pass.
    void look_on(int looks = 4) {
        for (int i = 0; i < looks && !done_; ++i) {
            bool over = false;
            Deadline next{io_};
            next.arm(limits::settle_poll, [&] {
                blocking_.run(
                    "x", [] { return true; }, [&](const Result<bool>&) { over = true; });
            });
            ASSERT_TRUE(test::run_until(io_, [&] { return over; }));
        }
    }
    Remains reclaimed() {
        EXPECT_TRUE(test::run_until(io_, [&] { return done_.has_value(); }));
        return *done_;
    }
    GpuReturn returned() const { return gpu_return(trace_.gpu, free_before_, *done_); }

    test::FakeGpus fake_{gpu_line};
    boost::asio::io_context io_;
    Gpus gpus_;
    BlockingQueue blocking_{io_};
    const std::string marker_ = fmt::format("gpu{}:m/0#7", ::getpid());
    MarkedProcess worker_{{"BULKHEAD_WORKER=" + marker_}};
    Trace trace_{{"m", 0, 7}, worker_.pid(), true, marker_, "bulkhead:none:", "GPU-a", {}, false};
    std::optional<std::uint64_t> free_before_;
    std::optional<Remains> done_;
};

TEST_F(GpuReclamation, IsVerifiedByTheDriversAccountOfTheProcess) {
    reclaim(process(worker_.pid(), had));
    EXPECT_TRUE(reclaimed().verified);
    EXPECT_EQ(returned().bytes, had);
    EXPECT_EQ(returned().by, "process");
}

TEST_F(GpuReclamation, WaitsForMemoryThatComesBackLateAlthoughItIsAtRestMeanwhile) {
    reclaim(process(worker_.pid(), had, "ghost"));
    look_on();
    ASSERT_FALSE(done_) << "equal readings alone prove nothing";
    machine("");
    EXPECT_TRUE(reclaimed().verified);
    EXPECT_EQ(returned().bytes, had);
}

TEST_F(GpuReclamation, WaitsForLateMemoryOfWhichTheDriverNamesNoOwner) {
    reclaim(process(worker_.pid(), had, "late_reads=8 unlisted"));
    EXPECT_TRUE(reclaimed().verified);
    EXPECT_EQ(done_->gpu_free_bytes, total);
}

TEST_F(GpuReclamation, NamesAGhostThatNeverFrees) {
    reclaim(process(worker_.pid(), had, "ghost"));
    const Remains result = reclaimed();
    EXPECT_FALSE(result.verified);
    ASSERT_EQ(result.held_by.size(), 1U);
    EXPECT_EQ(result.held_by[0], (Holder{worker_.pid(), "m/0", had, "gpu"}));
    EXPECT_EQ(returned().bytes, 0U);
}

TEST_F(GpuReclamation, ANeighbourThatAllocatesMeanwhileHidesNothingAndIsNotBlamed) {
    MarkedProcess neighbour{{}};
    leave(process(worker_.pid(), had) + process(neighbour.pid(), 1'000'000'000));
    machine(process(neighbour.pid(), 50'000'000'000));
    start();
    EXPECT_TRUE(reclaimed().verified);
    EXPECT_EQ(returned().bytes, had) << "the device's free memory fell";
    EXPECT_TRUE(done_->held_by.empty());
}

TEST_F(GpuReclamation, ANeighbourThatFreesMeanwhileDoesNotPassForTheWorkersMemory) {
    MarkedProcess neighbour{{}};
    leave(process(worker_.pid(), had, "ghost unlisted") + process(neighbour.pid(), 50'000'000'000));
    machine(process(worker_.pid(), had, "ghost unlisted"));
    const Remains remains = look_for_remains(trace_, gpus_);
    ASSERT_EQ(remains.held_by.size(), 1U);
    EXPECT_EQ(remains.held_by[0], (Holder{0, "no process", had, "gpu"}));
}

TEST_F(GpuReclamation, WithoutFiguresTheDevicesFreeMemoryIsTheMeasure) {
    reclaim(process(worker_.pid(), had, "na"));
    EXPECT_EQ(trace_.gpu->own_bytes, std::nullopt);
    EXPECT_TRUE(reclaimed().verified);
    EXPECT_EQ(returned().bytes, had);
    EXPECT_EQ(returned().by, "device");
}

TEST_F(GpuReclamation, WithoutFiguresWhatStillRisesIsNotAllThatComesBack) {
    MarkedProcess neighbour{{}};
    leave(process(worker_.pid(), had, "na late_reads=2") + process(neighbour.pid(), had, "na late_reads=3"));
    neighbour.kill();
    neighbour.wait();
    start();
    EXPECT_TRUE(reclaimed().verified);
    EXPECT_EQ(done_->gpu_free_bytes, total);
}

TEST_F(GpuReclamation, WithoutFiguresMemoryThatHasNotRisenAtAllIsNotBack) {
    reclaim(process(worker_.pid(), had, "na ghost unlisted"));
    look_on();
    EXPECT_FALSE(done_);
    machine("");
    EXPECT_TRUE(reclaimed().verified);
}

TEST_F(GpuReclamation, WithoutFiguresAFallOfFreeMemoryIsNoNegativeReturn) {
    leave(process(worker_.pid(), had, "na"));
    machine(process(0, 70'000'000'000));
    start();
    EXPECT_FALSE(reclaimed().verified) << "nothing shows that it came back";
    EXPECT_EQ(returned().bytes, 0U);
    EXPECT_TRUE(done_->held_by.empty());
}

TEST_F(GpuReclamation, CountsItsChildrenOnTheGpuAndNamesTheirGhosts) {
    auto child = std::make_unique<MarkedProcess>(std::vector<std::string>{"BULKHEAD_WORKER=" + marker_});
    MarkedProcess neighbour{{}};
    machine(process(worker_.pid(), had) + process(child->pid(), 500'000'000, "ghost") + process(neighbour.pid(), 7));
    sample();
    EXPECT_EQ(trace_.gpu->own_bytes, had + 500'000'000);
    EXPECT_THAT(trace_.gpu->pids, testing::UnorderedElementsAre(worker_.pid(), child->pid()));
    end_worker();

    EXPECT_EQ(look_for_remains(trace_, gpus_).held_by[0].what, "process") << "it is killed";
    EXPECT_EQ(child->wait(), SIGKILL);
    const Remains remains = look_for_remains(trace_, gpus_);
    ASSERT_EQ(remains.held_by.size(), 1U);
    EXPECT_EQ(remains.held_by[0].pid, child->pid());
    EXPECT_EQ(remains.held_by[0].what, "gpu");
}

TEST_F(GpuReclamation, OfALostGpuNothingCanBeVerified) {
    leave(process(worker_.pid(), had));
    fake_.set(gpu_line + "device 0 lost\n");
    start();
    EXPECT_FALSE(reclaimed().verified);
    EXPECT_EQ(returned().by, "process");
}

TEST_F(GpuReclamation, WhereTheDriverTellsNoMemoryTheListOfProcessesIsTheMeasure) {
    reclaim(process(worker_.pid(), had) + "device 0 na_memory\n");
    EXPECT_TRUE(reclaimed().verified);
    EXPECT_EQ(returned().bytes, had);
}

TEST_F(GpuReclamation, WaitsUntilNobodyMapsASlabOfIt) {
    trace_.gpu_uuid.clear();  // it was on the CPU
    auto slab = HostSlab::create(1 << 20, bulkhead::wire::SlabDirection::output, trace_.slab_prefix + "1:1");
    ASSERT_TRUE(slab) << slab.error().text();
    end_worker();
    start();
    look_on(1);
    ASSERT_FALSE(done_);
    slab = Error{};
    EXPECT_TRUE(reclaimed().verified);
}

TEST_F(GpuReclamation, LooksAtAllProcessesAgainOnlyWhenThoseItWaitsForAreGone) {
    MarkedProcess escaped{{"BULKHEAD_WORKER=" + marker_}};
    end_worker();
    start();
    EXPECT_TRUE(reclaimed().verified);
    EXPECT_EQ(escaped.wait(), SIGKILL);
}

}  // namespace
}  // namespace bulkhead::supervisor

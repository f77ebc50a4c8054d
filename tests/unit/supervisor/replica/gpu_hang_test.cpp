// GPUs that are at fault, and the models that wait for them.

#include <signal.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <future>

#include "supervisor/base/limits.h"
#include "tests/unit/supervisor/replica_fixture.h"

namespace bulkhead::supervisor {
namespace {

using namespace std::chrono_literals;
using test::FakeWorker;
using testing::HasSubstr;

class GpuHang : public test::GpuReplicaTest {
protected:
    /// Another model on the same GPU.
    struct Other {
        Other(FleetContext& context, const config::ModelSpec& like, const std::string& name)
            : log{name, std::nullopt}, spec{like} {
            spec.name = name;
            replica = std::make_unique<Replica>(context, spec, 0, log);
        }
        ModelLog log;
        config::ModelSpec spec;
        std::unique_ptr<Replica> replica;
    };
    void crash_while_loading(Replica& one) {
        const std::size_t before = keeper_.workers.size();
        one.load([](const Result<LoadedReplica>&) {});
        FakeWorker& worker = loading(before + 1);
        worker.say({{"type", "grant_asked"}});
        ASSERT_TRUE(wait([&] { return worker.got("grant"); })) << "before that it has not touched the GPU";
        keeper_.exit(worker, {true, SIGSEGV, true});
        ASSERT_TRUE(wait([&] {
            return one.state() == WorkerState::stopped || one.state() == WorkerState::quarantined;
        })) << one.sentence();
    }
};

TEST_F(GpuHang, AProcessAliveTenSecondsAfterSigkillQuarantinesItsGpuUntilItEnds) {
    keeper_.obeys = [](int) { return false; };
    spec_.deadlines.load = 300ms;
    load();
    FakeWorker& worker = loading();
    ASSERT_TRUE(wait([&] { return context_.gpu_quarantine.reason("GPU-a").has_value(); }));
    EXPECT_TRUE(worker.got_signal(SIGKILL));
    EXPECT_THAT(*context_.gpu_quarantine.reason("GPU-a"), HasSubstr("alive 10.0 s after SIGKILL"));
    EXPECT_THAT(std::string{replica().row().at("note").as_string()}, HasSubstr("alive 10.0 s after SIGKILL"));

    Other other{context_, spec_, "n"};
    std::optional<Error> refused;
    other.replica->load([&](const Result<LoadedReplica>& loaded) { refused = loaded.error(); });
    ASSERT_TRUE(wait([&] { return refused.has_value(); })) << "the loop goes on, and answers";
    EXPECT_THAT(refused->attempt, HasSubstr("alive 10.0 s after SIGKILL"));
    EXPECT_THAT(refused->remedy, HasSubstr("bulkhead gpus --lift GPU-a"));
    EXPECT_EQ(keeper_.workers.size(), 1U) << "nothing was started there";

    keeper_.exit(worker, {true, SIGKILL, true});
    wait_for(WorkerState::stopped);
    EXPECT_FALSE(context_.gpu_quarantine.reason("GPU-a")) << "it ended after all";
}

/// A real process, so that there is a pidfd: it waits to be killed, and is not reaped until then.
class Sleeper {
public:
    Sleeper() : pid_{::fork()} {
        if (pid_ != 0) return;
        while (true) ::pause();
    }
    ~Sleeper() {
        ::kill(pid_, SIGKILL);
        ::waitpid(pid_, nullptr, 0);
    }
    Sleeper(const Sleeper&) = delete;
    [[nodiscard]] UniqueFd pidfd() const { return UniqueFd{static_cast<int>(::syscall(SYS_pidfd_open, pid_, 0))}; }

private:
    pid_t pid_;
};

TEST_F(GpuHang, AKeeperThatPassesNothingOnIsBlamedAndNotTheProcessNorItsGpu) {
    const Sleeper sleeper;
    keeper_.pidfd = [&] { return sleeper.pidfd(); };
    keeper_.obeys = [](int) { return false; };
    spec_.deadlines.kill = 50ms;
    FakeWorker& worker = ready();
    unload();
    ASSERT_TRUE(wait([&] { return worker.got("drain"); }));
    worker.say({{"type", "drained"}});

    ASSERT_TRUE(wait([&] { return !unloads_.empty(); }));
    ASSERT_FALSE(unloads_[0]);
    EXPECT_EQ(unloads_[0].error().code, ErrorCode::deadline_exceeded);
    EXPECT_THAT(unloads_[0].error().attempt,
                HasSubstr("has ended, and the keeper (pid " + std::to_string(::getppid()) + ") does not say so"));
    EXPECT_FALSE(context_.gpu_quarantine.reason("GPU-a"));

    keeper_.exit(worker, {true, SIGKILL, true});
    wait_for(WorkerState::stopped);
}

TEST_F(GpuHang, ThreeModelsThatFailOnOneGpuWithinAMinuteQuarantineItAndNoModel) {
    Other b{context_, spec_, "b"};
    Other c{context_, spec_, "c"};
    context_.on_gpu_quarantined = [&](const std::string& uuid) {
        for (Replica* one : {&replica(), b.replica.get(), c.replica.get()}) one->gpu_was_quarantined(uuid);
    };
    for (int i = 0; i < 5; ++i) crash_while_loading(replica());
    ASSERT_EQ(replica().state(), WorkerState::quarantined);
    crash_while_loading(*b.replica);
    EXPECT_FALSE(context_.gpu_quarantine.reason("GPU-a")) << "two may be a coincidence";
    crash_while_loading(*c.replica);

    EXPECT_THAT(context_.gpu_quarantine.reason("GPU-a").value_or(""), HasSubstr("m, b, c"));
    EXPECT_EQ(replica().state(), WorkerState::stopped);
    EXPECT_THAT(replica().sentence(), HasSubstr("its GPU failed, not the model"));
    EXPECT_EQ(c.replica->state(), WorkerState::stopped);
}

TEST_F(GpuHang, WhoHasBeenReadyWaitsForItsQuarantinedGpuAndStartsWhenThatIsLifted) {
    context_.gpu_quarantine.lifted = [&] { replica().gpu_was_lifted(); };
    FakeWorker& first = ready();
    context_.gpu_quarantine.add("GPU-a", "it fell off the bus");
    keeper_.exit(first, {true, SIGKILL, true});  // by somebody else: no fault of model or GPU
    ASSERT_TRUE(wait([&] { return replica().sentence().find("waits for its GPU") != std::string::npos; }));
    EXPECT_EQ(replica().state(), WorkerState::backoff);
    EXPECT_THAT(replica().sentence(), HasSubstr("which is quarantined: it fell off the bus"));
    EXPECT_EQ(replica().row().at("restarts").to_number<int>(), 0) << "nothing was started";
    const auto generation = replica().row().at("generation");

    load();  // a person's is tried, and answered
    ASSERT_TRUE(wait([&] { return loads_.size() == 2; }));
    EXPECT_EQ(loads_[1].error().code, ErrorCode::resources_exhausted);
    ASSERT_EQ(replica().state(), WorkerState::backoff) << replica().sentence();
    std::optional<Error> refused;
    replica().load([&](const Result<LoadedReplica>& loaded) { refused = loaded.error(); }, Replica::Urgency::when_due);
    ASSERT_TRUE(refused.has_value()) << "nobody is left waiting for what may take days";
    EXPECT_EQ(refused->code, ErrorCode::resources_exhausted);
    EXPECT_THAT(refused->attempt, HasSubstr("it fell off the bus"));
    EXPECT_EQ(keeper_.workers.size(), 1U);

    ASSERT_TRUE(wait([&] { return blocking_.waiting() == 0; }));
    std::promise<void> seen;
    blocking_.run(
        "waiting", [seen = seen.get_future().share()] { return seen.wait(), true; }, [](const Result<bool>&) {});
    context_.gpu_quarantine.lift("GPU-a");
    EXPECT_EQ(blocking_.waiting(), 2U) << "it looks at once, not when its time has come";
    seen.set_value();
    loading(2).ready();
    wait_for(WorkerState::ready);
    EXPECT_EQ(replica().row().at("restarts").to_number<int>(), 1);
    EXPECT_NE(replica().row().at("generation"), generation);
}

TEST_F(GpuHang, WaitingForAGpuThatIsNotLiftedStaysQuietAndEndsByAnUnload) {
    context_.gpu_quarantine.lifted = [&] { replica().gpu_was_lifted(); };
    context_.gpu_quarantine.add("GPU-a", "it fell off the bus");
    replica().preload();
    wait_for(WorkerState::backoff);
    const auto generation = replica().row().at("generation");
    bool left = false;
    // Another GPU is lifted, again and again: its look finds its own as it was.
    for (int i = 0; i < 3; ++i) {
        context_.gpu_quarantine.add("GPU-z", "another");
        context_.gpu_quarantine.lift("GPU-z");
        ASSERT_TRUE(wait([&] { return blocking_.waiting() == 0; }));
        left = left || replica().state() != WorkerState::backoff;
    }
    EXPECT_FALSE(left);
    EXPECT_EQ(replica().row().at("generation"), generation) << "none was used up";
    context_.gpu_quarantine.lift("GPU-a");
    unload();  // while the look is under way
    EXPECT_EQ(replica().state(), WorkerState::stopped);
    ASSERT_TRUE(wait([&] { return blocking_.waiting() == 0; }));
    io_.restart();
    io_.poll();
    EXPECT_EQ(replica().state(), WorkerState::stopped);
    EXPECT_TRUE(keeper_.workers.empty());
}

TEST_F(GpuHang, AFirstLoadThatItsGpuRefusesIsAnsweredAndStaysStopped) {
    context_.gpu_quarantine.lifted = [&] { replica().gpu_was_lifted(); };
    context_.gpu_quarantine.add("GPU-a", "it fell off the bus");
    load();
    ASSERT_TRUE(wait([&] { return loads_.size() == 1; }));
    EXPECT_EQ(loads_[0].error().code, ErrorCode::resources_exhausted);
    wait_for(WorkerState::stopped);
    // A job answers a moment before it ends.
    ASSERT_TRUE(wait([&] { return blocking_.waiting() == 0; }));
    context_.gpu_quarantine.lift("GPU-a");
    EXPECT_EQ(blocking_.waiting(), 0U) << "nobody waits for it";
    EXPECT_EQ(replica().state(), WorkerState::stopped);
}

TEST_F(GpuHang, AGpuThatIsLostAsWellIsWaitedForUntilItIsFoundAgain) {
    context_.gpu_quarantine.lifted = [&] { replica().gpu_was_lifted(); };
    FakeWorker& first = ready();
    context_.gpu_quarantine.add("GPU-a", "it fell off the bus");
    keeper_.exit(first, {true, SIGKILL, true});
    ASSERT_TRUE(wait([&] { return replica().sentence().find("waits for its GPU") != std::string::npos; }));
    fake_.set("gpu GPU-a 10000000000 Fake\ndevice 0 lost\n");
    context_.gpu_quarantine.lift("GPU-a");
    ASSERT_TRUE(wait([&] { return blocking_.waiting() == 0; }));
    io_.restart();
    io_.poll();
    EXPECT_EQ(replica().state(), WorkerState::backoff) << "it is not there, whatever a person says";
    EXPECT_EQ(keeper_.workers.size(), 1U);
    fake_.set("gpu GPU-a 10000000000 Fake\n");
    loading(2).ready();  // nobody tells it: it looks again by itself
    wait_for(WorkerState::ready);
}

}  // namespace
}  // namespace bulkhead::supervisor

/// A replica against a worker end that the test plays, with a keeper that starts no process.

#include "tests/unit/supervisor/scenario.h"

namespace bulkhead::supervisor {
namespace {

using namespace std::chrono_literals;
using test::FakeWorker;
using test::GpuReplicaTest;
using test::play_scenarios;
using test::ReplicaTest;
using testing::HasSubstr;

TEST_F(ReplicaTest, IsReadyWhenItsWorkerSaysSoAndNotBefore) {
    spec_.environment = {{"OWN", "1"}};
    load();
    FakeWorker& worker = spawned();
    EXPECT_EQ(replica().state(), WorkerState::spawning);
    EXPECT_THAT(worker.environment,
                testing::IsSupersetOf({"OWN=1", "BULKHEAD_WORKER=token:m/0#1", "CUDA_VISIBLE_DEVICES="}));

    worker.hello();
    ASSERT_TRUE(wait([&] { return worker.got("configure"); }));
    EXPECT_EQ(worker.received[0].at("device").as_string(), "cpu");
    EXPECT_EQ(worker.received[0].at("model").at("name").as_string(), "m");
    worker.say({{"type", "grant_asked"}, {"device_bytes", 0}});
    ASSERT_TRUE(wait([&] { return worker.got("grant"); }));
    worker.say({{"type", "progress"}, {"phase", "capturing"}, {"done", 1}, {"total", 4}, {"unit", "steps"}});
    wait_for(WorkerState::capturing);
    EXPECT_THAT(replica().sentence(), HasSubstr("capturing, 1 of 4 steps"));
    EXPECT_TRUE(loads_.empty());

    worker.ready();
    ASSERT_TRUE(wait([&] { return !loads_.empty(); }));
    EXPECT_EQ(loads_[0]->state, WorkerState::ready);
    EXPECT_EQ(loads_[0]->pid, worker.pid);
    EXPECT_EQ(context_.torch, "2.11.0");
}

/// What comes later for a process asks whether the process is there before it touches the replica.
TEST_F(ReplicaTest, TheStartUnderWayOfAReplicaThatIsGoneKeepsNothingOfIt) {
    load();
    const std::weak_ptr process = replica().process();
    replica_.reset();
    EXPECT_TRUE(process.expired());
    EXPECT_TRUE(wait([&] { return blocking_.waiting() == 0; }));
}

TEST_F(ReplicaTest, GarbageOnItsLinkIsIgnored) {
    FakeWorker& worker = ready();
    for (const char* garbage :
         {"", "{", "[1]", "7", R"({"type":7})", R"({"type":"hello","protocol":3})", R"({"type":"???"})",
          R"({"type":"ready"})", R"({"type":"drained"})", R"({"type":"grant_asked"})",
          R"({"type":"statistics","requests":-1,"graphs":[]})", R"({"type":"channel_closed","channel":99})"})
        worker.say_text(garbage);
    worker.say_text(std::string(60'000, '['));
    worker.say({{"type", "busy"}});
    wait_for(WorkerState::busy);
    EXPECT_EQ(replica().row().at("ignored_frames"), 1) << "the empty one is counted";
}

TEST_F(ReplicaTest, AQuestionForStatisticsIsAnsweredEvenByDeath) {
    FakeWorker& worker = ready();
    int answers = 0;
    replica().ask_statistics([&] { ++answers; });
    ASSERT_TRUE(wait([&] { return worker.got("statistics_asked"); }));
    worker.say({{"type", "statistics"}, {"requests", 3}, {"queued", 2}, {"ignored_frames", 4}});
    ASSERT_TRUE(wait([&] { return answers == 1; }));
    EXPECT_EQ(replica().row().at("queued").to_number<int>(), 2);
    EXPECT_EQ(replica().row().at("ignored_frames").to_number<int>(), 4);

    replica().ask_statistics([&] { ++answers; });
    keeper_.exit(worker, {true, SIGKILL, true});
    ASSERT_TRUE(wait([&] { return answers == 2; }));
}

TEST_F(GpuReplicaTest, LoadsOfOneGpuTakeTurns) {
    ModelLog other_log{"n", std::nullopt};
    config::ModelSpec other_spec = spec_;
    other_spec.name = "n";
    Replica other{context_, other_spec, 0, other_log};

    load();
    FakeWorker& first = loading();
    EXPECT_EQ(first.received[0].at("device").as_string(), "cuda");
    EXPECT_THAT(first.environment, testing::Contains("CUDA_VISIBLE_DEVICES=GPU-a"));
    first.say({{"type", "grant_asked"}, {"device_bytes", 1}});
    ASSERT_TRUE(wait([&] { return first.got("grant"); }));

    other.load([](const Result<LoadedReplica>&) {});
    FakeWorker& second = loading(2);
    second.say({{"type", "grant_asked"}, {"device_bytes", 1}});
    second.say({{"type", "progress"}, {"phase", "loading"}});
    ASSERT_TRUE(wait([&] { return other.process()->load.progress().phase == "loading"; }));
    EXPECT_FALSE(second.got("grant"));

    first.ready();
    ASSERT_TRUE(wait([&] { return second.got("grant"); }));
}

[[maybe_unused]] const bool of_ReplicaScenario = play_scenarios(
    "ReplicaScenario", __FILE__, __LINE__,
    {

        {"IsBusyWhileRequestsAreInFlight",
         "ready; says busy in_flight=1; state busy; says idle in_flight=0; state ready"},
        {"TwoConcurrentLoadsAreOneLoad",
         "load; load; loading; load; says ready; loads 3 ok; workers 1; load; loads 4 now"},
        {"ALoadThatFailsAnswersInTheWorkersOwnWords", R"(load; loading
        says failed code=out_of_memory attempt='allocating 9 GiB' remedy='use less'
        loads 1 out_of_memory 'allocating 9 GiB' 'use less'; is crashed; exits 1; state stopped
        sentence 'out_of_memory: allocating 9 GiB'; forgotten 1; workers 1)"},
        {"Status78QuarantinesAtOnceUntilAPersonLiftsIt", R"(load; loading
        says failed code=package_incompatible attempt='wrong CPU' remedy='export again'; exits 78
        state quarantined; loads 1 package_incompatible
        load when_due; loads 2 model_quarantined '~wrong CPU'; unload; receipt none; load; ready 2)"},
        {"TheLoadDeadlineNamesThePhaseAndEndsTheProcessTheHardWay", R"(declare load 200ms; obeys SIGKILL; load; loading
        says progress phase=reading done=1048576 total=94371840 unit=bytes
        loads 1 deadline_exceeded '~reading, 1.0 MiB of 90.0 MiB'
        state stopped; signals SIGCONT SIGABRT SIGKILL*)"},
        {"ACallersOwnDeadlineEndsItsWaitButNotTheLoad",
         "load 20ms; loading; loads 1 deadline_exceeded; says ready; state ready; loads 1 now"},
        {"ACrashWhileLoadingSaysHowAndWhere", "load; loading; says progress phase=warming done=0 total=0\n"
                                              "prints 'terminate called: out of \x1b[1mpatience'; says dying signal=6\n"
                                              R"(state crashed; exits SIGABRT
        loads 1 load_failed ~SIGABRT; loads 1 load_failed '~in phase warming'
        loads 1 load_failed '~out of \x1b[1mpatience'; state stopped)"},
        {"AProcessThatCannotBeStartedIsToldAndLeavesNothingBehind",
         "spawn_fails; load; loads 1 resources_exhausted; state stopped; forgotten"},
        {"AWorkerThatLiesAboutItselfIsEnded", R"(load; spawned
        says hello protocol=[1,1] model=other replica=0 generation=1
        loads 1 protocol_violation; gets SIGKILL; state stopped)"},
        {"AWorkerOfAnotherReleaseIsEndedWithBothVersions", R"(load; spawned
        says hello protocol=[7,9] model=m replica=0 generation=1; loads 1 * '~7 to 9')"},
        {"TheFirstSignOfDeathEndsItsChannelsAtOnce",
         "ready; opens ok; got channel; says dying signal=11; state crashed; hung_up"},
        {"RestartNeverLeavesItStoppedWithTheReason",
         "declare restart never; ready; exits SIGSEGV; state stopped; sentence SIGSEGV; load; ready 2"},
        {"FiveCrashesInARowQuarantineIt", R"(ready; exits SIGSEGV; ready 2; exits SIGSEGV; ready 3; exits SIGSEGV
        ready 4; exits SIGSEGV; ready 5; exits SIGSEGV; state quarantined
        sentence '5 crashes'; sentence 'bulkhead load m')"},
        {"ALoadDuringBackoffStartsItNow", R"(ready; exits SIGSEGV; state backoff; load; is spawning
        ready 2; exits SIGSEGV; state backoff; load; is spawning
        ready 3; exits SIGSEGV; state backoff; load; is spawning
        ready 4; exits SIGSEGV; state backoff; load; is spawning; ready 5)"},
        {"ChannelsAreBounded", R"(declare channels 2; ready; opens ok; opens ok; opens resources_exhausted
        says channel_closed channel=1; channels 1; opens ok)"},
        {"TheReceiptCountsTheRiseOfFreeMemory", R"(gpu 'process 0 0 4000000000'; ready; unload; got drain; says drained
        gpu 'process 0 0 1000000000'; exits 0; receipt drained gpu_bytes=3000000000 verified=true)"},
        {"AGpuThatIsNotThereQuarantinesWithWhatThereIs", R"(gpu; declare device cuda:5; load
        loads 1 config_invalid ~ '~cuda:0 (Fake, GPU-a)'; state quarantined; workers 0)"},
    });

}  // namespace
}  // namespace bulkhead::supervisor

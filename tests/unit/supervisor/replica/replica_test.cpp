/// A replica against a worker end that the test plays, with a keeper that starts no process.

#include "tests/unit/supervisor/replica_fixture.h"

namespace bulkhead::supervisor {
namespace {

using namespace std::chrono_literals;
using test::FakeWorker;
using test::GpuReplicaTest;
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

TEST_F(ReplicaTest, IsBusyWhileRequestsAreInFlight) {
    FakeWorker& worker = ready();
    worker.say({{"type", "busy"}, {"in_flight", 1}});
    wait_for(WorkerState::busy);
    worker.say({{"type", "idle"}, {"in_flight", 0}});
    wait_for(WorkerState::ready);
}

TEST_F(ReplicaTest, TwoConcurrentLoadsAreOneLoad) {
    load();
    load();
    FakeWorker& worker = loading();
    load();
    worker.ready();
    ASSERT_TRUE(wait([&] { return loads_.size() == 3; }));
    for (const auto& loaded : loads_) EXPECT_EQ(loaded->pid, worker.pid);
    EXPECT_EQ(keeper_.workers.size(), 1U);
    load();
    EXPECT_EQ(loads_.size(), 4U) << "a ready model answers at once";
}

TEST_F(ReplicaTest, ALoadThatFailsAnswersInTheWorkersOwnWords) {
    load();
    FakeWorker& worker = loading();
    worker.say(
        {{"type", "failed"}, {"code", "out_of_memory"}, {"attempt", "allocating 9 GiB"}, {"remedy", "use less"}});
    ASSERT_TRUE(wait([&] { return !loads_.empty(); }));
    EXPECT_EQ(loads_[0].error(), (Error{ErrorCode::out_of_memory, "allocating 9 GiB", "use less"}));
    EXPECT_EQ(replica().state(), WorkerState::crashed);

    keeper_.exit(worker, {false, 1, true});
    wait_for(WorkerState::stopped);
    EXPECT_THAT(replica().sentence(), HasSubstr("out_of_memory: allocating 9 GiB"));
    EXPECT_EQ(keeper_.forgotten.size(), 1U);
    EXPECT_EQ(keeper_.workers.size(), 1U) << "whoever asked has the answer; nothing is tried behind their back";
}

TEST_F(ReplicaTest, Status78QuarantinesAtOnceUntilAPersonLiftsIt) {
    load();
    FakeWorker& worker = loading();
    worker.say(
        {{"type", "failed"}, {"code", "package_incompatible"}, {"attempt", "wrong CPU"}, {"remedy", "export again"}});
    keeper_.exit(worker, {false, 78, true});
    wait_for(WorkerState::quarantined);
    EXPECT_EQ(loads_[0].error().code, ErrorCode::package_incompatible);

    replica().load([this](Result<LoadedReplica> result) { loads_.push_back(std::move(result)); },
                   Replica::Urgency::when_due);
    EXPECT_EQ(loads_[1].error().code, ErrorCode::model_quarantined) << "opening a channel is no person's word";
    EXPECT_THAT(loads_[1].error().attempt, HasSubstr("wrong CPU"));
    unload();
    EXPECT_FALSE(unloads_[0]->has_value()) << "no process, no receipt";

    load();
    loading(2).ready();
    wait_for(WorkerState::ready);
}

TEST_F(ReplicaTest, TheLoadDeadlineNamesThePhaseAndEndsTheProcessTheHardWay) {
    spec_.deadlines.load = 200ms;
    keeper_.obeys = [](int number) { return number == SIGKILL; };
    load();
    FakeWorker& worker = loading();
    worker.say({{"type", "progress"}, {"phase", "reading"}, {"done", 1 << 20}, {"total", 90 << 20}, {"unit", "bytes"}});
    ASSERT_TRUE(wait([&] { return !loads_.empty(); }));
    EXPECT_EQ(loads_[0].error().code, ErrorCode::deadline_exceeded);
    EXPECT_THAT(loads_[0].error().attempt, HasSubstr("reading, 1.0 MiB of 90.0 MiB"));

    wait_for(WorkerState::stopped);
    EXPECT_THAT(worker.signals,
                testing::ElementsAre(std::pair{SIGCONT, false}, std::pair{SIGABRT, false}, std::pair{SIGKILL, true}))
        << "first a backtrace, then the end of everything it started";
}

TEST_F(ReplicaTest, ACallersOwnDeadlineEndsItsWaitButNotTheLoad) {
    replica().load([this](Result<LoadedReplica> result) { loads_.push_back(std::move(result)); }, Replica::Urgency::now,
                   20ms);
    FakeWorker& worker = loading();
    ASSERT_TRUE(wait([&] { return !loads_.empty(); }));
    EXPECT_EQ(loads_[0].error().code, ErrorCode::deadline_exceeded);
    worker.ready();
    wait_for(WorkerState::ready);
    EXPECT_EQ(loads_.size(), 1U);
}

TEST_F(ReplicaTest, ACrashWhileLoadingSaysHowAndWhere) {
    load();
    FakeWorker& worker = loading();
    worker.say({{"type", "progress"}, {"phase", "warming"}, {"done", 0}, {"total", 0}});
    worker.print("terminate called: out of \x1b[1mpatience\n");
    worker.say({{"type", "dying"}, {"signal", SIGABRT}});
    wait_for(WorkerState::crashed);
    keeper_.exit(worker, {true, SIGABRT, true});
    ASSERT_TRUE(wait([&] { return !loads_.empty(); }));
    EXPECT_EQ(loads_[0].error().code, ErrorCode::load_failed);
    EXPECT_THAT(loads_[0].error().attempt, HasSubstr("SIGABRT"));
    EXPECT_THAT(loads_[0].error().attempt, HasSubstr("in phase warming"));
    EXPECT_THAT(loads_[0].error().attempt, HasSubstr("out of \\x1b[1mpatience"));
    wait_for(WorkerState::stopped);
}

TEST_F(ReplicaTest, AProcessThatCannotBeStartedIsToldAndLeavesNothingBehind) {
    keeper_.spawn_error = Error{ErrorCode::resources_exhausted, "starting a process for m/0: clone3: …", ""};
    load();
    ASSERT_TRUE(wait([&] { return !loads_.empty(); }));
    EXPECT_EQ(loads_[0].error().code, ErrorCode::resources_exhausted);
    wait_for(WorkerState::stopped);
    EXPECT_TRUE(keeper_.forgotten.empty());
}

TEST_F(ReplicaTest, AWorkerThatLiesAboutItselfIsEnded) {
    load();
    FakeWorker& worker = spawned();
    worker.say({{"type", "hello"},
                {"protocol", boost::json::array{1, 1}},
                {"model", "other"},
                {"replica", 0},
                {"generation", 1}});
    ASSERT_TRUE(wait([&] { return !loads_.empty(); }));
    EXPECT_EQ(loads_[0].error().code, ErrorCode::protocol_violation);
    EXPECT_TRUE(worker.got_signal(SIGKILL));
    wait_for(WorkerState::stopped);
}

TEST_F(ReplicaTest, AWorkerOfAnotherReleaseIsEndedWithBothVersions) {
    load();
    FakeWorker& worker = spawned();
    worker.say(
        {{"type", "hello"}, {"protocol", boost::json::array{7, 9}}, {"model", "m"}, {"replica", 0}, {"generation", 1}});
    ASSERT_TRUE(wait([&] { return !loads_.empty(); }));
    EXPECT_THAT(loads_[0].error().attempt, HasSubstr("7 to 9"));
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
}

TEST_F(ReplicaTest, TheFirstSignOfDeathEndsItsChannelsAtOnce) {
    FakeWorker& worker = ready();
    auto opened = replica().open_channel({"test", 1, 0});
    ASSERT_TRUE(opened) << opened.error().text();
    ASSERT_TRUE(wait([&] { return worker.got("channel"); }));
    ASSERT_EQ(worker.channels.size(), 1U);
    EXPECT_TRUE(send_packet(worker.channels[0].get(), std::string_view{"delivered before"}));
    EXPECT_FALSE(at_end_of_file(opened->client_end));

    worker.say({{"type", "dying"}, {"signal", SIGSEGV}});
    wait_for(WorkerState::crashed);

    EXPECT_TRUE(at_end_of_file(opened->client_end)) << "though the worker's end is still open";
    std::array<std::byte, packet_bytes_max> buffer;
    Packet packet;
    EXPECT_EQ(receive_packet(opened->client_end.get(), buffer, packet).value(), ReceiveOutcome::packet);
    EXPECT_EQ(receive_packet(opened->client_end.get(), buffer, packet).value(), ReceiveOutcome::closed);
}

TEST_F(ReplicaTest, AModelThatWasReadyIsStartedAgainAfterACrash) {
    FakeWorker& worker = ready();
    keeper_.exit(worker, {true, SIGKILL, true});
    FakeWorker& next = loading(2);
    EXPECT_GT(next.name.generation, worker.name.generation);
    next.ready();
    wait_for(WorkerState::ready);
    EXPECT_EQ(replica().row().at("restarts").to_number<int>(), 1);
    EXPECT_EQ(replica().why().at("last_exit").at("signal").as_string(), "SIGKILL");
    EXPECT_THAT(replica().sentence(), HasSubstr("SIGKILL"));
}

TEST_F(ReplicaTest, RestartNeverLeavesItStoppedWithTheReason) {
    spec_.restart = config::RestartPolicy::never;
    FakeWorker& worker = ready();
    keeper_.exit(worker, {true, SIGSEGV, true});
    wait_for(WorkerState::stopped);
    EXPECT_THAT(replica().sentence(), HasSubstr("SIGSEGV"));
    load();
    loading(2).ready();
    wait_for(WorkerState::ready);
}

TEST_F(ReplicaTest, FiveCrashesInARowQuarantineIt) {
    FakeWorker* worker = &ready();
    for (std::size_t crash = 1; crash <= 5; ++crash) {
        keeper_.exit(*worker, {true, SIGSEGV, true});
        if (crash == 5) break;
        worker = &loading(crash + 1);
        worker->ready();
        wait_for(WorkerState::ready);
    }
    wait_for(WorkerState::quarantined);
    EXPECT_THAT(replica().sentence(), HasSubstr("5 crashes"));
    EXPECT_THAT(replica().sentence(), HasSubstr("bulkhead load m"));
}

TEST_F(ReplicaTest, ALoadDuringBackoffStartsItNow) {
    FakeWorker* worker = &ready();
    for (std::size_t crash = 1; crash <= 4; ++crash) {  // the next delay would be a second
        keeper_.exit(*worker, {true, SIGSEGV, true});
        wait_for(WorkerState::backoff);
        load();
        EXPECT_EQ(replica().state(), WorkerState::spawning);
        worker = &loading(crash + 1);
        worker->ready();
        wait_for(WorkerState::ready);
    }
}

TEST_F(ReplicaTest, AnUnloadDuringBackoffStopsIt) {
    FakeWorker& worker = ready();
    keeper_.exit(worker, {true, SIGSEGV, true});
    keeper_.exit(loading(2), {true, SIGSEGV, true});
    wait_for(WorkerState::backoff);
    unload();
    EXPECT_EQ(replica().state(), WorkerState::stopped);
    EXPECT_EQ(receipt().worker.generation, 2U) << "of the process that crashed, when its memory is back";
}

TEST_F(ReplicaTest, AnOverrunEndsTheProcessAndSaysWhatRanTooLong) {
    FakeWorker& worker = ready();
    worker.say({{"type", "overrun"}, {"method", "forward"}, {"running_ms", 31'000}, {"budget_ms", 30'000}});
    ASSERT_TRUE(wait([&] { return worker.got_signal(SIGABRT); }));
    wait_for(WorkerState::spawning);
    EXPECT_THAT(json::serialize(log_.tail(10)), HasSubstr("forward ran 31.0 s, budget 30.0 s"));
}

TEST_F(ReplicaTest, AQuestionForStatisticsIsAnsweredEvenByDeath) {
    FakeWorker& worker = ready();
    int answers = 0;
    replica().ask_statistics([&] { ++answers; });
    ASSERT_TRUE(wait([&] { return worker.got("statistics_asked"); }));
    worker.say({{"type", "statistics"}, {"requests", 3}, {"queued", 2}});
    ASSERT_TRUE(wait([&] { return answers == 1; }));
    EXPECT_EQ(replica().row().at("queued").to_number<int>(), 2);

    replica().ask_statistics([&] { ++answers; });
    keeper_.exit(worker, {true, SIGKILL, true});
    ASSERT_TRUE(wait([&] { return answers == 2; }));
}

TEST_F(ReplicaTest, ChannelsAreBounded) {
    spec_.channel.channels_max = 2;
    FakeWorker& worker = ready();
    const auto first = replica().open_channel({"a", 1, 0});
    const auto second = replica().open_channel({"b", 1, 0});
    EXPECT_EQ(replica().open_channel({"c", 1, 0}).error().code, ErrorCode::resources_exhausted);
    worker.say({{"type", "channel_closed"}, {"channel", first->id}});
    ASSERT_TRUE(wait([&] { return replica().channels() == 1; }));
    EXPECT_TRUE(replica().open_channel({"c", 1, 0}));
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
    ASSERT_TRUE(wait([&] { return other.process()->progress.phase == "loading"; }));
    EXPECT_FALSE(second.got("grant"));

    first.ready();
    ASSERT_TRUE(wait([&] { return second.got("grant"); }));
}

TEST_F(GpuReplicaTest, TheReceiptCountsTheRiseOfFreeMemory) {
    fake_.set("gpu GPU-a 10000000000 Fake\nprocess 0 0 4000000000\n");
    FakeWorker& worker = ready();
    unload();
    ASSERT_TRUE(wait([&] { return worker.got("drain"); }));
    worker.say({{"type", "drained"}});
    fake_.set("gpu GPU-a 10000000000 Fake\nprocess 0 0 1000000000\n");
    keeper_.exit(worker, {false, 0, true});
    const Receipt got = receipt();
    EXPECT_EQ(got.gpu_bytes, 3'000'000'000U);
    EXPECT_TRUE(got.verified);
}

TEST_F(GpuReplicaTest, AGpuThatIsNotThereQuarantinesWithWhatThereIs) {
    spec_.device = "cuda:5";
    load();
    ASSERT_TRUE(wait([&] { return !loads_.empty(); }));
    EXPECT_EQ(loads_[0].error().code, ErrorCode::config_invalid);
    EXPECT_THAT(loads_[0].error().remedy, HasSubstr("cuda:0 (Fake, GPU-a)"));
    wait_for(WorkerState::quarantined);
    EXPECT_TRUE(keeper_.workers.empty());
}

}  // namespace
}  // namespace bulkhead::supervisor

/// Processes that wait for a model: who takes one, what becomes of the others.

#include "tests/unit/supervisor/planned_fleet_fixture.h"

namespace bulkhead::supervisor {
namespace {

using test::FakeWorker;
using test::spec_of;
using testing::Contains;

const memory::DeviceId host{memory::host};

config::ModelSpec with_environment(const std::string& name, const std::string& value) {
    auto spec = spec_of(name);
    spec.environment["FLAVOR"] = value;
    return spec;
}

class BlanksTest : public test::PlannedFleet {
protected:
    /// Without limits.
    void begin_on_cpu(std::uint32_t blanks, std::vector<config::ModelSpec> models) {
        declared_.blanks["cpu"] = blanks;
        declare(std::move(models));
        fleet_->preload();
    }
    std::vector<FakeWorker*> blanks() {
        std::vector<FakeWorker*> all;
        for (const auto& worker : keeper_.workers)
            if (worker->name.model == Blanks::model && !worker->reaped) all.push_back(worker.get());
        return all;
    }
    /// The only one, once the daemon knows it.
    FakeWorker& one_blank() {
        EXPECT_TRUE(wait([&] { return status("waiting") == 1; }));
        return *blanks().at(0);
    }
    std::int64_t status(const char* member) { return fleet_->blanks().status().at(member).to_number<std::int64_t>(); }
    static json::object configure_of(FakeWorker& worker) {
        for (const auto& packet : worker.received)
            if (packet.at("type").as_string() == "configure") return packet;
        return {};
    }
    ReplicaRecord kept(const FakeWorker& worker) {
        return ReplicaRecord::parse(keeper_.ledgers.at(worker.name.generation)).value();
    }
    /// A load that has taken the blank, which has its configuration.
    FakeWorker& taken(const std::string& model) {
        FakeWorker& blank = one_blank();
        blank.hello();
        load(model);
        EXPECT_TRUE(wait([&] { return blank.got("configure"); }));
        return blank;
    }
    /// The next supervisor, with what the keeper has of this one.
    void supervise_again(std::vector<config::ModelSpec> models) {
        fleet_.reset();
        auto found = keeper_.hand_over();
        declare(std::move(models));
        std::map<std::string, std::string> declarations;
        for (const auto& spec : declared_.models) declarations[spec.name] = fingerprint(spec);
        fleet_->adopt(std::move(found), declarations, {});
    }
};

TEST_F(BlanksTest, ALoadTakesOneAndAnotherIsStarted) {
    begin_on_cpu(1, {spec_of("a")});
    FakeWorker& blank = taken("a");

    const auto configure = configure_of(blank);
    EXPECT_EQ(configure.at("model").at("name").as_string(), "a");
    EXPECT_EQ(configure.at("replica").to_number<int>(), 0);
    EXPECT_EQ(configure.at("generation").to_number<int>(), 2) << "not that of the blank";
    EXPECT_EQ(kept(blank).name, (WorkerName{"a", 0, 2})) << "who it is, known to the next supervisor";
    blank.ready();
    ASSERT_TRUE(wait([&] { return replica("a").state() == WorkerState::ready; }));
    EXPECT_EQ(replica("a").process()->pid, blank.pid);
    ASSERT_TRUE(wait([&] { return keeper_.workers.size() == 2; }));
    EXPECT_EQ(keeper_.latest().name, (WorkerName{Blanks::model, 0, 3}));
}

TEST_F(BlanksTest, OneThatDoesNotSayHelloYetIsTakenToo) {
    begin_on_cpu(1, {spec_of("a")});
    FakeWorker& blank = one_blank();
    EXPECT_EQ(status("ready"), 0);
    load("a");
    blank.hello();
    EXPECT_TRUE(wait([&] { return blank.got("configure"); }));
    EXPECT_EQ(keeper_.workers.size(), 1u);
}

TEST_F(BlanksTest, EachWayToStartHasItsOwn) {
    begin_on_cpu(1, {spec_of("a"), with_environment("b", "sweet"), spec_of("c"), with_environment("d", "sour")});
    ASSERT_TRUE(wait([&] { return status("waiting") == 3; }));
    EXPECT_EQ(status("wanted"), 3);
    for (FakeWorker* blank : blanks()) blank->hello();
    load("d");
    ASSERT_TRUE(wait([&] { return replica("d").process() && replica("d").process()->pid != 0; }));
    const auto all = blanks();
    const auto taken = std::ranges::find(all, replica("d").process()->pid, &FakeWorker::pid);
    ASSERT_NE(taken, all.end()) << "a process was started";
    EXPECT_THAT((*taken)->environment, Contains("FLAVOR=sour"));
    EXPECT_EQ(status("waiting"), 2);
}

TEST_F(BlanksTest, ProcessesAreInterchangeableThatDifferInTheirNameAlone) {
    context_.launch.cores = 2;
    const auto conditions = [&](const config::ModelSpec& spec, const WorkerName& name, const std::string& gpu = "") {
        return StartConditions::of(*context_.launch.request(name, spec, gpu));
    };
    const auto plain = conditions(spec_of("a"), {"a", 0, 1});
    EXPECT_EQ(conditions(spec_of("b"), {Blanks::model, 0, 7}), plain);
    EXPECT_NE(conditions(with_environment("b", "sweet"), {"b", 0, 1}), plain);
    EXPECT_NE(conditions(spec_of("b"), {"b", 0, 1}, "GPU-1"), plain) << "it sees another device";
    auto generating = spec_of("b");
    generating.runtime = config::Runtime::generate;
    EXPECT_NE(conditions(generating, {"b", 0, 1}), plain) << "its threads wait otherwise";
    auto dumping = spec_of("b");
    dumping.core_bytes_max = 1 << 20;
    EXPECT_NE(conditions(dumping, {"b", 0, 1}), plain);
}

TEST_F(BlanksTest, ADeadOneIsForgottenAndReplacedAndIsNotTakenAndNobodysCrash) {
    begin_on_cpu(1, {spec_of("a")});
    FakeWorker& blank = one_blank();
    blank.hello();
    keeper_.exit(blank, {true, SIGKILL, true});
    ASSERT_TRUE(wait([&] { return keeper_.forgotten.size() == 1; }));
    EXPECT_EQ(status("waiting"), 0);
    EXPECT_EQ(replica("a").state(), WorkerState::stopped);
    load("a");
    ASSERT_TRUE(wait([&] { return keeper_.workers.size() == 2; }));
    EXPECT_EQ(keeper_.latest().name.model, "a");
    EXPECT_TRUE(wait([&] { return keeper_.workers.size() == 3 && status("waiting") == 1; }));
}

TEST_F(BlanksTest, OneThatDiesAsItIsTakenIsACrashOfItsModel) {
    begin_on_cpu(1, {spec_of("a")});
    FakeWorker& blank = taken("a");
    keeper_.exit(blank, {true, SIGSEGV, true});
    ASSERT_TRUE(wait([&] { return keeper_.forgotten.size() == 1; }));
    EXPECT_EQ(keeper_.forgotten.at(0), blank.name) << "as the keeper knows it";
    EXPECT_THAT(replica("a").sentence(), testing::HasSubstr("SIGSEGV"));
}

TEST_F(BlanksTest, TheyEndWhenModelsNeedTheirMemory) {
    begin_on_cpu(2, {spec_of("a")});
    ASSERT_TRUE(wait([&] { return status("waiting") == 2; }));
    fleet_->blanks().fit(host, -1);
    ASSERT_TRUE(wait([&] { return keeper_.forgotten.size() == 2; }));
    EXPECT_EQ(status("waiting"), 0);
    fleet_->blanks().fit(host, 0);
    EXPECT_TRUE(wait([&] { return status("waiting") == 2; })) << "there is room again";
}

TEST_F(BlanksTest, AStopWaitsForTheirEnd) {
    begin_on_cpu(1, {spec_of("a")});
    FakeWorker& blank = one_blank();
    keeper_.obeys = nullptr;
    int stopped = 0;
    for (int who = 0; who < 2; ++who) fleet_->stop([&](const auto&) { ++stopped; });
    ASSERT_TRUE(blank.got_signal(SIGKILL));
    EXPECT_EQ(stopped, 0);
    keeper_.exit(blank, {true, SIGKILL, true});
    EXPECT_TRUE(wait([&] { return stopped == 2; })) << "a person asked, and the service manager did";
    EXPECT_EQ(keeper_.forgotten.size(), 1u);
}

TEST_F(BlanksTest, TheNextSupervisorEndsThemAndAdoptsThoseThatHaveAModel) {
    begin_on_cpu(1, {spec_of("a")});
    FakeWorker& worker = taken("a");
    worker.ready();
    ASSERT_TRUE(wait([&] { return status("waiting") == 1; }));
    FakeWorker& blank = keeper_.latest();
    ASSERT_NE(blank.name, worker.name);

    supervise_again({spec_of("a")});
    EXPECT_TRUE(blank.got_signal(SIGKILL));
    ASSERT_TRUE(wait([&] { return worker.got("hello_asked"); }));
    worker.hello_again({{"configured", true}, {"phase", "ready"}, {"in_flight", 0}, {"grant", "none"}},
                       {{"model", "a"}, {"generation", 2}});
    ASSERT_TRUE(wait([&] { return replica("a").state() == WorkerState::ready; }));
    EXPECT_EQ(replica("a").process()->name, (WorkerName{"a", 0, 2}));
    EXPECT_GE(context_.generation_last, 3u);

    replica("a").unload([](const auto&) {});
    ASSERT_TRUE(wait([&] { return worker.got("drain"); }));
    worker.say({{"type", "drained"}});
    keeper_.exit(worker, {false, 0, true});
    ASSERT_TRUE(wait([&] { return replica("a").kept_receipt().has_value(); }));
    EXPECT_EQ(replica("a").kept_receipt()->worker, (WorkerName{"a", 0, 2}));
    replica("a").receipt_told();
    EXPECT_THAT(keeper_.forgotten, testing::UnorderedElementsAre(blank.name, worker.name));
}

TEST_F(BlanksTest, OneThatWasTakenAndNotConfiguredIsConfiguredByTheNextSupervisor) {
    begin_on_cpu(1, {spec_of("a")});
    FakeWorker& blank = one_blank();
    load("a");
    ASSERT_TRUE(wait([&] { return !keeper_.ledgers.at(blank.name.generation).empty(); }));
    ASSERT_TRUE(wait([&] { return !replica("a").declaration().empty(); }));

    supervise_again({spec_of("a")});
    ASSERT_TRUE(wait([&] { return blank.got("hello_asked"); }));
    blank.hello_again({{"configured", false}, {"phase", "starting"}, {"in_flight", 0}, {"grant", "none"}});
    ASSERT_TRUE(wait([&] { return blank.got("configure"); }));
    EXPECT_EQ(configure_of(blank).at("generation").to_number<int>(), 2);
}

// --- on a GPU of 8 GB

class GpuBlanksTest : public BlanksTest {
protected:
    static config::ModelSpec on_gpu(const std::string& name, std::uint64_t bytes) { return on("cuda:0", name, bytes); }
    void begin_on_gpu(std::vector<config::ModelSpec> models) {
        declared_.blanks = {{"cuda:0", 1}};
        begin(std::move(models));
        fleet_->preload();
    }
    /// One whose context has so much.
    FakeWorker& made(std::uint64_t bytes) {
        FakeWorker& blank = one_blank();
        hold(blank, bytes);
        blank.hello();
        EXPECT_TRUE(wait([&] { return status("gpu_bytes") == static_cast<std::int64_t>(bytes); }));
        return blank;
    }
    FakeWorker& process_of(const std::string& model) {
        EXPECT_TRUE(wait([&] { return keeper_.latest().name.model == model; }));
        FakeWorker& worker = keeper_.latest();
        worker.hello();
        EXPECT_TRUE(wait([&] { return worker.got("configure"); }));
        worker.say({{"type", "grant_asked"}, {"device_bytes", 1}});
        return worker;
    }
};

TEST_F(GpuBlanksTest, OneIsTakenByALoadOnItsGpuWithItsContext) {
    begin_on_gpu({on_gpu("a", 1'000'000'000)});
    FakeWorker& blank = made(300'000'000);
    EXPECT_THAT(blank.environment, Contains("CUDA_VISIBLE_DEVICES=GPU-a"));
    EXPECT_EQ(status("wanted"), 1);
    EXPECT_EQ(kept(blank).gpu_uuid, "GPU-a");
    const json::array ledger = fleet_->admission().ledger();
    EXPECT_EQ(ledger.at(1).at("blanks"), json::value(300'000'000)) << json::serialize(ledger);
    EXPECT_EQ(ledger.at(1).at("foreign"), json::value(0)) << "it is ours";
    load("a");
    EXPECT_TRUE(wait([&] { return blank.got("configure"); }));
    EXPECT_EQ(replica("a").process()->pid, blank.pid);
    EXPECT_EQ(kept(blank).name, (WorkerName{"a", 0, 2}));
    EXPECT_EQ(status("gpu_bytes"), 0) << "it is the model's now";
}

TEST_F(GpuBlanksTest, WhileOneMakesItsContextItIsNotTakenAndHasTheTurn) {
    begin_on_gpu({on_gpu("a", 1'000'000'000)});
    FakeWorker& blank = one_blank();
    load("a");
    FakeWorker& worker = process_of("a");
    settle();
    EXPECT_FALSE(worker.got("grant")) << "two would change the memory of one GPU";
    EXPECT_FALSE(blank.got("configure"));
    blank.hello();
    EXPECT_TRUE(wait([&] { return worker.got("grant"); }));
}

TEST_F(GpuBlanksTest, OneThatDiesWhileItMakesItsContextLeavesTheTurnToALoad) {
    begin_on_gpu({on_gpu("a", 1'000'000'000)});
    FakeWorker& blank = one_blank();
    load("a");
    FakeWorker& worker = process_of("a");
    keeper_.exit(blank, {false, 1, true});
    EXPECT_TRUE(wait([&] { return worker.got("grant"); }));
    EXPECT_EQ(keeper_.forgotten, std::vector{blank.name});
}

TEST_F(GpuBlanksTest, ALoadThatNeedsItsMemoryIsGrantedWhenThatIsBack) {
    auto large = on_gpu("large", 7'900'000'000);
    large.environment["FLAVOR"] = "sweet";  // it cannot take the blank of the other
    begin_on_gpu({on_gpu("a", 1'000'000'000), large});
    FakeWorker& blank = made(300'000'000);
    load("large");
    EXPECT_TRUE(wait([&] { return blank.got_signal(SIGKILL); }));
    FakeWorker& worker = process_of("large");
    settle();
    EXPECT_FALSE(worker.got("grant")) << "the driver lists the blank";
    give_back(blank);
    EXPECT_TRUE(wait([&] { return worker.got("grant"); }));
}

TEST_F(GpuBlanksTest, WhoAsksForRoomHasItWhenTheirMemoryIsBack) {
    begin_on_gpu({on_gpu("a", 1'000'000'000)});
    const FakeWorker& blank = made(300'000'000);
    bool answered = false;
    fleet_->admission().make_room("cuda:0", 7'900'000'000, "game", {}, [&](const auto& made) {
        answered = true;
        EXPECT_TRUE(made && made->short_of.empty());
    });
    ASSERT_TRUE(wait([&] { return blank.got_signal(SIGKILL); }));
    settle();
    EXPECT_FALSE(answered) << "the driver lists the blank";
    give_back(blank);
    EXPECT_TRUE(wait([&] { return answered; }));
}

TEST_F(GpuBlanksTest, TheNextSupervisorGrantsNothingUntilTheirMemoryIsBack) {
    begin_on_gpu({on_gpu("a", 1'000'000'000)});
    const FakeWorker& blank = made(300'000'000);
    fleet_.reset();
    auto found = keeper_.hand_over();
    declared_.blanks.clear();
    declare({on_gpu("a", 1'000'000'000)});
    fleet_->begin({}, [] {});
    fleet_->adopt(std::move(found), {}, {});
    EXPECT_TRUE(blank.got_signal(SIGKILL));
    load("a");
    FakeWorker& worker = process_of("a");
    settle();
    EXPECT_FALSE(worker.got("grant")) << "the driver lists the blank";
    give_back(blank);
    EXPECT_TRUE(wait([&] { return worker.got("grant"); }));
}

TEST_F(GpuBlanksTest, NoneWaitsOnAGpuInQuarantine) {
    begin_on_gpu({on_gpu("a", 1'000'000'000)});
    FakeWorker& blank = made(300'000'000);
    context_.gpu_quarantine.add("GPU-a", "three models failed on it");
    load("a");  // looks at the devices before
    EXPECT_TRUE(wait([&] { return blank.got_signal(SIGKILL); }));
    EXPECT_EQ(status("waiting"), 0);
}

}  // namespace
}  // namespace bulkhead::supervisor

/// Processes that wait for a model: who takes one, what becomes of the others.

#include <gmock/gmock.h>

#include "supervisor/fleet/fleet_change.h"
#include "tests/unit/supervisor/fleet_fixture.h"

namespace bulkhead::supervisor {
namespace {

using test::FakeWorker;
using test::spec_of;
using testing::Contains;

config::ModelSpec with_environment(const std::string& name, const std::string& value) {
    auto spec = spec_of(name);
    spec.environment["FLAVOR"] = value;
    return spec;
}

class BlanksTest : public test::FleetFixture {
protected:
    void begin(std::uint32_t blanks, std::vector<config::ModelSpec> models) {
        declared_.blanks = blanks;
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
    Replica& replica(const std::string& model) { return *(*fleet_->find(model))->replicas[0]; }
    void load(const std::string& model) {
        fleet_->load({*fleet_->find(model)}, {}, [](const auto&) {});
    }
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
    void supervise_anew(std::vector<config::ModelSpec> models) {
        fleet_.reset();
        auto found = keeper_.hand_over();
        declare(std::move(models));
        std::map<std::string, std::string> declarations;
        for (const auto& spec : declared_.models) declarations[spec.name] = fingerprint(spec);
        fleet_->adopt(std::move(found), declarations, {});
    }
};

TEST_F(BlanksTest, ALoadTakesOneAndAnotherIsStarted) {
    begin(1, {spec_of("a")});
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
    begin(1, {spec_of("a")});
    FakeWorker& blank = one_blank();
    EXPECT_EQ(status("ready"), 0);
    load("a");
    blank.hello();
    EXPECT_TRUE(wait([&] { return blank.got("configure"); }));
    EXPECT_EQ(keeper_.workers.size(), 1u);
}

TEST_F(BlanksTest, EachWayToStartHasItsOwn) {
    begin(1, {spec_of("a"), with_environment("b", "sweet"), spec_of("c"), with_environment("d", "sour")});
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

TEST_F(BlanksTest, ADeadOneIsForgottenAndNotTaken) {
    begin(1, {spec_of("a")});
    FakeWorker& blank = one_blank();
    blank.hello();
    keeper_.exit(blank, {true, SIGKILL, true});
    ASSERT_TRUE(wait([&] { return keeper_.forgotten.size() == 1; }));
    EXPECT_EQ(status("waiting"), 0);
    load("a");
    ASSERT_TRUE(wait([&] { return keeper_.workers.size() == 2; }));
    EXPECT_EQ(keeper_.latest().name.model, "a");
}

TEST_F(BlanksTest, OneThatDiesAsItIsTakenIsACrashOfItsModel) {
    begin(1, {spec_of("a")});
    FakeWorker& blank = taken("a");
    keeper_.exit(blank, {true, SIGSEGV, true});
    ASSERT_TRUE(wait([&] { return keeper_.forgotten.size() == 1; }));
    EXPECT_EQ(keeper_.forgotten.at(0), blank.name) << "as the keeper knows it";
    EXPECT_THAT(replica("a").sentence(), testing::HasSubstr("SIGSEGV"));
}

TEST_F(BlanksTest, TheyEndWhenModelsNeedTheirMemory) {
    begin(2, {spec_of("a")});
    ASSERT_TRUE(wait([&] { return status("waiting") == 2; }));
    fleet_->blanks().fit(-1);
    ASSERT_TRUE(wait([&] { return keeper_.forgotten.size() == 2; }));
    EXPECT_EQ(status("waiting"), 0);
    fleet_->blanks().fit(0);
    EXPECT_TRUE(wait([&] { return status("waiting") == 2; })) << "there is room again";
}

TEST_F(BlanksTest, AStopWaitsForTheirEnd) {
    begin(1, {spec_of("a")});
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
    begin(1, {spec_of("a")});
    FakeWorker& worker = taken("a");
    worker.ready();
    ASSERT_TRUE(wait([&] { return status("waiting") == 1; }));
    FakeWorker& blank = keeper_.latest();
    ASSERT_NE(blank.name, worker.name);

    supervise_anew({spec_of("a")});
    EXPECT_TRUE(blank.got_signal(SIGKILL));
    ASSERT_TRUE(wait([&] { return worker.got("hello_asked"); }));
    worker.say({{"type", "hello"},
                {"protocol", json::array{1, 1}},
                {"model", "a"},
                {"replica", 0},
                {"generation", 2},
                {"pid", worker.pid},
                {"nonce", worker.received.back().at("nonce")},
                {"channels", json::array{}},
                {"state", {{"configured", true}, {"phase", "ready"}, {"in_flight", 0}, {"grant", "none"}}},
                {"loaded", {{"load_ms", 12}, {"torch", "2.11.0"}, {"device", "cpu"}, {"graphs", json::object{}}}}});
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
    begin(1, {spec_of("a")});
    FakeWorker& blank = one_blank();
    load("a");
    ASSERT_TRUE(wait([&] { return !keeper_.ledgers.at(blank.name.generation).empty(); }));
    ASSERT_TRUE(wait([&] { return !replica("a").declaration().empty(); }));

    supervise_anew({spec_of("a")});
    ASSERT_TRUE(wait([&] { return blank.got("hello_asked"); }));
    blank.say({{"type", "hello"},
               {"protocol", json::array{1, 1}},
               {"model", blank.name.model},
               {"replica", 0},
               {"generation", blank.name.generation},
               {"pid", blank.pid},
               {"nonce", blank.received.back().at("nonce")},
               {"channels", json::array{}},
               {"state", {{"configured", false}, {"phase", "starting"}, {"in_flight", 0}, {"grant", "none"}}}});
    ASSERT_TRUE(wait([&] { return blank.got("configure"); }));
    EXPECT_EQ(configure_of(blank).at("generation").to_number<int>(), 2);
}

TEST_F(BlanksTest, AnotherNumberOfThemIsAChangeOfTheFleet) {
    config::Fleet fleet{"", {spec_of("a")}};
    config::Fleet next = fleet;
    EXPECT_TRUE(compare(fleet, next, {}).is_nothing());
    next.blanks = 2;
    EXPECT_FALSE(compare(fleet, next, {}).is_nothing());
}

}  // namespace
}  // namespace bulkhead::supervisor

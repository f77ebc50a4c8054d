/// What a fleet does with several models, or several replicas of one.

#include <gmock/gmock.h>

#include "tests/unit/supervisor/fleet_fixture.h"

namespace bulkhead::supervisor {
namespace {

using namespace std::chrono_literals;
using test::FakeWorker;
using test::spec_of;

class FleetTest : public test::FleetFixture {
protected:
    Model& model(const std::string& name) { return **fleet_->find(name); }
    void begin() {
        fleet_->begin({}, [] {});
    }
    void load(const std::string& name) {
        fleet_->load({&model(name)}, {}, [](const auto&) {});
    }
    /// The next process becomes ready.
    FakeWorker& ready() {
        const std::size_t count = ++ready_;
        EXPECT_TRUE(wait([&] { return keeper_.workers.size() >= count; }));
        FakeWorker& worker = *keeper_.workers.at(count - 1);
        worker.hello();
        EXPECT_TRUE(wait([&] { return worker.got("configure"); }));
        worker.ready();
        const Replica& replica = *model(worker.name.model).replicas[worker.name.replica];
        EXPECT_TRUE(wait([&] { return replica.state() == WorkerState::ready; }));
        return worker;
    }
    void drain(FakeWorker& worker) {
        ASSERT_TRUE(wait([&] { return worker.got("drain"); }));
        worker.say({{"type", "drained"}});
        keeper_.exit(worker, {false, 0, true});
    }

    std::size_t ready_ = 0;
};

TEST_F(FleetTest, AReloadUnloadsTheReplicasThatTheNextFleetDoesNotHave) {
    auto two = spec_of("a");
    two.replicas = two.replicas_min = 2;
    declare({two});
    load("a");
    FakeWorker& kept = ready();
    FakeWorker& surplus = ready();
    bool retired = false;
    fleet_->retire({"", {spec_of("a")}}, [&] { retired = true; });
    ASSERT_FALSE(retired) << "what the next supervisor does not know, it kills";
    drain(surplus);
    EXPECT_TRUE(wait([&] { return retired; }));
    EXPECT_FALSE(kept.got("drain"));
}

TEST_F(FleetTest, AChannelToAModelThatGoesForAnotherWaitsForItsTurn) {
    auto a = spec_of("a");
    a.declared_bytes = 1 << 20;
    a.min_resident = 1ms;
    a.group = config::ModelGroup{"large", config::GroupKind::exclusive};
    auto b = a;
    b.name = "b";
    declare({a, b});
    begin();
    load("a");
    FakeWorker& first = ready();
    load("b");
    ASSERT_TRUE(wait([&] { return first.got("drain"); }));

    std::optional<Result<OpenedChannel>> opened;
    fleet_->open_channel(model("a"), {}, {}, [&](Result<OpenedChannel> channel) { opened = std::move(channel); });
    ASSERT_FALSE(opened) << opened->error().text();
    drain(first);
    drain(ready());
    ready();
    ASSERT_TRUE(wait([&] { return opened.has_value(); }));
    EXPECT_TRUE(*opened) << opened->error().text();
}

TEST_F(FleetTest, AModelWhoseRequestsWaitGetsItsSpareReplica) {
    auto one_or_two = spec_of("a");
    one_or_two.replicas = 2;
    one_or_two.declared_bytes = 1 << 20;
    one_or_two.deadlines.request = 1h;  // so long nobody asks whether it hangs
    declare({one_or_two});
    begin();
    load("a");
    FakeWorker& worker = ready();
    worker.say({{"type", "busy"}, {"in_flight", 1}});
    ASSERT_TRUE(wait([&] { return worker.got("statistics_asked"); }));
    worker.say({{"type", "statistics"}, {"in_flight", 1}, {"queued", 1}});
    EXPECT_EQ(ready().name.replica, 1U);
}

}  // namespace
}  // namespace bulkhead::supervisor

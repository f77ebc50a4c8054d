/// The ledger when the supervisor dies: the next one's is the same, field by field.

#include <cstdio>

#include "tests/support/property.h"
#include "tests/unit/supervisor/planned_fleet_fixture.h"

namespace bulkhead::supervisor {
namespace {

using namespace std::chrono_literals;
using test::FakeWorker;

class LedgerTest : public test::PlannedFleet {
protected:
    /// All but `foreign` and what is reclaimed: these are read from the machine, each time again.
    std::string ledger() {
        json::array all = fleet_->admission().ledger();
        for (json::value& device : all) {
            device.as_object().erase("foreign");
            device.as_object().erase("reclaiming");
            json::array holding;
            for (json::value& one : device.at("workers").as_array())
                if (one.at("holds").as_string() != "reclaiming") holding.push_back(one);
            device.as_object()["workers"] = std::move(holding);
        }
        return json::serialize(all);
    }
    /// Answers its new supervisor.
    void answer(FakeWorker& worker, bool configured, bool is_ready, std::uint32_t in_flight) {
        json::object hello{{"type", "hello"},
                           {"protocol", json::array{1, 1}},
                           {"model", worker.name.model},
                           {"replica", worker.name.replica},
                           {"generation", worker.name.generation},
                           {"pid", worker.pid},
                           {"nonce", worker.received.back().at("nonce")},
                           {"channels", json::array{}},
                           {"state",
                            {{"configured", configured},
                             {"phase", is_ready ? "ready" : "loading"},
                             {"in_flight", in_flight},
                             {"grant", "none"}}}};
        if (is_ready)
            hello["loaded"] = {{"load_ms", 12}, {"torch", "2.11.0"}, {"device", "cpu"}, {"graphs", json::object{}}};
        worker.say(hello);
    }
};

TEST_F(LedgerTest, ALoneLoadKeepsTheWholeDevice) {
    begin({on("cuda:0", "new"), on("cuda:0", "next", 2 * gb)});
    load("new");
    (void)loading(1);
    ASSERT_EQ(books("cuda:0", "reserved"), 8 * gb);
    supervise_anew();
    EXPECT_EQ(books("cuda:0", "reserved"), 8 * gb);
    load("next");
    settle();
    EXPECT_EQ(keeper_.workers.size(), 1U) << "nothing is free";
}

TEST_F(LedgerTest, WhenAModelWasInUseLastIsKnownToTheNextSupervisor) {
    auto kept = on("cuda:0", "a", 2 * gb);
    kept.keep_alive = 1h;
    begin({kept});
    load("a");
    FakeWorker& worker = ready(1);
    auto record = json::parse(keeper_.ledgers.at(worker.name.generation)).as_object();
    const auto half_an_hour_ago = record.at("used_ms").to_number<std::int64_t>() - 1'800'000;
    record["used_ms"] = record["ready_ms"] = half_an_hour_ago;
    keeper_.ledgers[worker.name.generation] = json::serialize(record);

    supervise_anew();
    json::object row;
    fleet_->admission().add_outlook(replica("a"), row);
    const auto unload_at = row.at("unload_at").to_number<std::int64_t>();
    EXPECT_NEAR(static_cast<double>(unload_at), static_cast<double>(half_an_hour_ago + 3'600'000), 600'000);
    ASSERT_TRUE(wait([&] { return worker.got("hello_asked"); }));
    answer(worker, true, true, 0);
    ASSERT_TRUE(wait([&] { return replica("a").state() == WorkerState::ready; }));
    settle();
    EXPECT_NEAR(static_cast<double>(ReplicaRecord::parse(keeper_.ledgers.at(worker.name.generation))->used_unix_ms),
                static_cast<double>(half_an_hour_ago), 1'000)
        << "and to the one after it";
}

/// Loads, unloads, crashes, requests, memory that runs out, and supervisors that die at any of these moments.
class LedgerHistory : public LedgerTest {
protected:
    struct Life {
        bool configured = false;
        bool is_ready = false;
        bool busy = false;
    };

    void make_fleet(bulkhead::test::RandomWalk& walk) {
        const std::vector<std::string> devices{"cuda:0", "cuda:1", "cpu"};
        std::vector<config::ModelSpec> models;
        for (std::uint64_t i = 0; i < 2 + walk.below(4); ++i) {
            auto one = on(devices[walk.below(3)], "m" + std::to_string(i));
            if (!walk.one_in(3)) one.declared_bytes = gb / 2 * (1 + walk.below(16));
            if (walk.one_in(3))
                for (const std::string& device : devices)
                    if (device != one.device && walk.one_in(2)) one.other_devices.push_back(device);
            if (walk.one_in(3)) one.replicas = one.replicas_min = 2;
            if (walk.one_in(4)) one.group = config::ModelGroup{"g", config::GroupKind::exclusive};
            one.priority = static_cast<std::uint32_t>(walk.below(3));
            one.deadlines.request = 1h;
            models.push_back(std::move(one));
        }
        begin(std::move(models));
    }
    std::vector<FakeWorker*> living() {
        std::vector<FakeWorker*> all;
        for (const auto& worker : keeper_.workers)
            if (!worker->reaped) all.push_back(worker.get());
        return all;
    }
    void end(FakeWorker& worker, ProcessExit exit) {
        give_back(worker);
        keeper_.exit(worker, exit);
    }
    void step(bulkhead::test::RandomWalk& walk) {
        const std::string name = declared_.models[walk.below(declared_.models.size())].name;
        switch (walk.below(9)) {
        case 0:
        case 1:
        case 2: return load(name);
        case 3: return fleet_->unload({&model(name)}, [](const auto&) {});
        case 4:
            return fleet_->open_channel(model(name), {"ana", 7, 0}, {}, [this](Result<OpenedChannel> opened) {
                if (opened) opened_.push_back(std::move(*opened));
            });
        default: break;
        }
        const auto workers = living();
        if (workers.empty()) return;
        FakeWorker& worker = *workers[walk.below(workers.size())];
        Life& life = lives_[worker.name.generation];
        if (walk.one_in(6)) return end(worker, {true, SIGSEGV, true});
        if (!life.configured) {
            worker.hello();
            life.configured = true;
        } else if (!life.is_ready && walk.one_in(5)) {
            worker.say({{"type", "failed"}, {"code", "out_of_memory"}, {"attempt", "loading"}, {"remedy", ""}});
            end(worker, {false, 1, true});
        } else if (!life.is_ready) {
            if (worker.got("configure") && !walk.one_in(4)) hold(worker, gb / 4 * (1 + walk.below(24)));
            say_ready(worker);
            life.is_ready = true;
        } else {
            life.busy = !life.busy;
            worker.say({{"type", life.busy ? "busy" : "idle"}, {"in_flight", life.busy ? 1 : 0}});
        }
    }
    /// Who was asked for something does it.
    void obey(bulkhead::test::RandomWalk& walk) {
        for (FakeWorker* worker : living()) {
            Life& life = lives_[worker->name.generation];
            if (worker->got("hello_asked")) {
                answer(*worker, life.configured, life.is_ready, life.busy ? 1 : 0);
                worker->received.clear();
            } else if (worker->got("drain") && walk.one_in(2)) {
                worker->say({{"type", "drained"}});
                end(*worker, {false, 0, true});
            }
        }
    }
    /// A replica that waits for its restart does not know that the memory of its last process is awaited.
    bool may_compare() {
        turn();
        for (const json::value& device : fleet_->admission().ledger())
            for (const json::value& one : device.at("workers").as_array()) {
                const Replica& of =
                    replica(std::string{one.at("model").as_string()}, one.at("replica").to_number<std::uint32_t>());
                if (of.state() == WorkerState::backoff) return false;
            }
        return true;
    }

    std::map<std::uint64_t, Life> lives_;  ///< by generation
    std::vector<OpenedChannel> opened_;
};

TEST_F(LedgerHistory, EachSupervisorHasTheLedgerOfTheOneBefore) {
    bulkhead::test::RandomWalk walk{400};
    make_fleet(walk);
    std::size_t compared = 0;
    std::size_t with_workers = 0;
    for (std::uint64_t i = 0; i < walk.steps; ++i) {
        step(walk);
        walk.one_in(2) ? settle() : turn();
        obey(walk);
        if (!walk.one_in(6) || !may_compare()) continue;
        const std::string before = ledger();
        supervise_anew();
        ASSERT_EQ(ledger(), before) << "step " << i;
        ++compared;
        with_workers += before.find("\"model\"") != std::string::npos ? 1 : 0;
    }
    std::printf("%zu ledgers compared, %zu of them with workers\n", compared, with_workers);
    if (walk.steps >= 400) {
        EXPECT_GT(compared, 20U);
    }
}

}  // namespace
}  // namespace bulkhead::supervisor

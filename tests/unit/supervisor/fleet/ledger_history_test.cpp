/// Histories of the ledger over supervisors that die: the next one's is the same, field by field.

#include <cstdio>
#include <set>

#include "tests/support/property.h"
#include "tests/unit/supervisor/planned_fleet_fixture.h"

namespace bulkhead::supervisor {
namespace {

using namespace std::chrono_literals;
using test::FakeWorker;

/// Loads, unloads, crashes, requests, memory that runs out, and supervisors that die at any of
/// these moments.
class LedgerHistory : public test::PlannedFleet {
protected:
    struct Life {
        bool configured = false;
        bool is_ready = false;
        bool busy = false;
        std::uint64_t ran_out = 0;  ///< requests, for want of memory
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
    /// Its memory on a GPU comes back later.
    void end(FakeWorker& worker, ProcessExit exit) {
        if (!gpu_of(worker)) give_back(worker);
        keeper_.exit(worker, exit);
    }
    void give_some_back(bulkhead::test::RandomWalk& walk) {
        for (const auto& worker : keeper_.workers)
            if (worker->reaped && held_.contains(worker->pid) && walk.one_in(3)) give_back(*worker);
    }
    /// The driver never says that more is used of a GPU than it has.
    std::uint64_t at_most_free(int gpu, std::uint64_t bytes) {
        std::uint64_t used = others_[gpu];
        for (const auto& [pid, held] : held_) used += held.first == gpu ? held.second : 0;
        const std::uint64_t total = (gpu == 0 ? 8 : 16) * gb;
        return std::min(bytes, total - std::min(total, used));
    }
    static void say_statistics(FakeWorker& worker, const Life& life) {
        worker.say({{"type", "statistics"},
                    {"in_flight", life.busy ? 1 : 0},
                    {"queued", 0},
                    {"errors", life.ran_out},
                    {"out_of_memory", life.ran_out}});
    }
    /// What its process is measured with from now on.
    void measure(FakeWorker& worker, bulkhead::test::RandomWalk& walk) {
        Replica& of = replica(worker.name.model, worker.name.replica);
        if (!of.process() || of.process()->name != worker.name || !of.process()->ready_at) return;
        of.process()->memory.take(HostMemory{gb / 10 * (1 + walk.below(9)), gb / 10 * walk.below(20)}, true);
        fleet_->admission().measured(of);
    }
    void step(bulkhead::test::RandomWalk& walk) {
        const std::string name = declared_.models[walk.below(declared_.models.size())].name;
        if (walk.one_in(8)) {
            const int gpu = static_cast<int>(walk.below(2));
            others_[gpu] = 0;
            others_[gpu] = at_most_free(gpu, gb / 4 * walk.below(8));
            set_machine();
        }
        switch (walk.below(9)) {
        case 0:
        case 1:
        case 2: return load(name);
        case 3: return fleet_->unload({&model(name)}, [](const auto&) {});
        case 4:
            return fleet_->open_channel(model(name), {"ana", 7, 0}, {}, [this](Result<OpenedChannel> opened) {
                if (opened) channels_.push_back(std::move(*opened));
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
            if (const auto gpu = gpu_of(worker); gpu && worker.got("configure") && !walk.one_in(4))
                if (const auto bytes = at_most_free(*gpu, gb / 4 * (1 + walk.below(24))); bytes > 0)
                    hold(worker, bytes);
            say_ready(worker);
            life.is_ready = true;
        } else if (walk.one_in(8)) {
            ++life.ran_out;
            say_statistics(worker, life);
        } else if (walk.one_in(4)) {
            measure(worker, walk);
        } else {
            life.busy = !life.busy;
            worker.say({{"type", life.busy ? "busy" : "idle"}, {"in_flight", life.busy ? 1 : 0}});
        }
    }
    /// Who was asked for something does it.
    void obey(bulkhead::test::RandomWalk& walk) {
        give_some_back(walk);
        for (FakeWorker* worker : living()) {
            Life& life = lives_[worker->name.generation];
            if (worker->got("hello_asked")) {
                answer(*worker, life.configured, life.is_ready, life.busy ? 1 : 0);
                worker->received.clear();
            } else if (worker->got("statistics_asked")) {
                say_statistics(*worker, life);
                std::erase_if(worker->received,
                              [](const auto& one) { return one.at("type").as_string() == "statistics_asked"; });
            } else if (worker->got("drain") && walk.one_in(2)) {
                worker->say({{"type", "drained"}});
                end(*worker, {false, 0, true});
            }
        }
    }
    /// "reclaiming in backoff", of each worker that holds memory in the ledger.
    std::set<std::string> holders(const json::array& ledger) {
        std::set<std::string> all;
        for (const json::value& device : ledger)
            for (const json::value& one : device.at("workers").as_array()) {
                const Replica& of =
                    replica(std::string{one.at("model").as_string()}, one.at("replica").to_number<std::uint32_t>());
                all.insert(std::string{one.at("holds").as_string()} + " in " + std::string{to_string(of.state())});
            }
        return all;
    }

    /// Each reservation is one of a process. One whose process was not asked for yet dies with
    /// the supervisor.
    bool is_spawned(const json::array& ledger) {
        for (const json::value& device : ledger)
            for (const json::value& one : device.at("workers").as_array()) {
                const Replica& of =
                    replica(std::string{one.at("model").as_string()}, one.at("replica").to_number<std::uint32_t>());
                const bool is_there = std::ranges::any_of(keeper_.workers, [&](const auto& worker) {
                    return of.process() && !of.process()->end.exit && worker->name == of.process()->born_as;
                });
                if (one.at("holds").as_string() == "reserved" && !is_there) return false;
            }
        return true;
    }
    /// Who asked for an unload has its receipt; otherwise each supervisor would make it again.
    void tell_receipts() {
        for (const config::ModelSpec& spec : declared_.models)
            for (const auto& replica : model(spec.name).replicas)
                if (replica->kept_receipt()) replica->receipt_told();
    }
    /// The only receipts awaited on GPUs are of memory that the driver lists.
    bool is_quiet() {
        const auto is_listed = [&](const json::value& one) {
            return std::ranges::any_of(keeper_.workers, [&](const auto& worker) {
                return worker->reaped && held_.contains(worker->pid) && worker->name.model == one.at("model").as_string() &&
                       worker->name.replica == one.at("replica").to_number<std::uint32_t>();
            });
        };
        for (const json::value& device : fleet_->admission().ledger())
            for (const json::value& one : device.at("workers").as_array())
                if (device.at("device").as_string() != "cpu" && one.at("holds").as_string() == "reclaiming" &&
                    !is_listed(one))
                    return false;
        return true;
    }

    std::map<std::uint64_t, Life> lives_;  ///< by generation
    std::vector<OpenedChannel> channels_;
};

TEST_F(LedgerHistory, EachSupervisorHasTheLedgerOfTheOneBefore) {
    bulkhead::test::RandomWalk walk{400};
    make_fleet(walk);
    std::size_t compared = 0;
    std::size_t with_others = 0;
    std::size_t with_mapped = 0;
    std::map<std::string, std::size_t> seen;
    for (std::uint64_t i = 0; i < walk.steps; ++i) {
        step(walk);
        walk.one_in(2) ? settle() : turn();
        obey(walk);
        if (!walk.one_in(6)) continue;
        settle();
        ASSERT_TRUE(wait([&] { return is_quiet(); }));
        const auto others = foreign();
        std::optional<test::BlockedQueue> block{std::in_place, blocking_};
        turn();
        tell_receipts();
        const json::array before = ledger();
        if (!is_spawned(before)) continue;
        for (const std::string& one : holders(before)) ++seen[one];
        block.reset();
        supervise_again([&] { block.emplace(blocking_); });
        ASSERT_EQ(json::serialize(ledger()), json::serialize(before)) << "step " << i;
        block.reset();
        ASSERT_EQ(foreign(), others) << "step " << i << " " << json::serialize(before);
        ++compared;
        with_others += others[0] + others[1] > 0 ? 1 : 0;
        with_mapped += books("cpu", "mapped") > 0 ? 1 : 0;
    }
    std::printf("%zu ledgers compared, %zu with other programs on a GPU, %zu with mapped weights\n", compared,
                with_others, with_mapped);
    for (const auto& [one, times] : seen) std::printf("%zu times %s\n", times, one.c_str());
    if (walk.steps >= 400) {
        EXPECT_GT(compared, 20U);
    }
}

}  // namespace
}  // namespace bulkhead::supervisor

/// What `top` makes of the daemon's answers: rows, rates, the parts of each bar.

#include <boost/json.hpp>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "clients/cli/top/bar.h"
#include "clients/cli/top/numbers.h"
#include "clients/cli/top/snapshot.h"

namespace bulkhead::cli::top {
namespace {

namespace json = boost::json;
using testing::ElementsAre;
using testing::IsEmpty;

constexpr std::uint64_t mib = 1024 * 1024;

json::value status(int requests, int generation = 1, int tokens = 0) {
    return {{"models",
             {{{"model", "a"},
               {"replica", 0},
               {"state", "busy"},
               {"device", "cpu"},
               {"host_bytes", 100 * mib},
               {"requests", requests},
               {"generation", generation},
               {"generate", {{"tokens", tokens}, {"step_ms", {{"p50", 20.0}, {"p99", 30.0}}}}}}}}};
}

TEST(TopSampler, MakesRatesOfCounters) {
    Sampler sampler;
    const WorkerRow first = sampler.take({status(10, 1, 100), {}, {}}, {}, 1'000).workers.at(0);
    EXPECT_EQ(first.requests_per_s, 0) << "nothing to compare with";
    const WorkerRow second = sampler.take({status(25, 1, 150), {}, {}}, {}, 3'000).workers.at(0);
    EXPECT_DOUBLE_EQ(second.requests_per_s, 7.5);
    EXPECT_DOUBLE_EQ(second.tokens_per_s.value(), 25);
    EXPECT_EQ(second.p99_ms, 30.0) << "of a model that generates, of its steps";
    const WorkerRow next = sampler.take({status(27, 2, 205), {}, {}}, {}, 4'000).workers.at(0);
    EXPECT_EQ(next.tokens_per_s, 0.0) << "a new process starts at zero";
    EXPECT_DOUBLE_EQ(next.requests_per_s, 2) << "requests count over all generations";
}

TEST(TopSampler, TellsWhatTorchsAllocatorHasAndThePeakOfItWhereTheDriverTellsNone) {
    Sampler sampler;
    json::value answer = status(1);
    json::object& row = answer.at("models").at(0).as_object();
    row["graphs"] = {{"allocated_bytes", 5 * mib}, {"reserved_bytes", 8 * mib}, {"peak_bytes", 9 * mib}};
    const auto take = [&] { return sampler.take({answer, {}, {}}, {}, 1'000).workers.at(0); };
    EXPECT_EQ(take().allocated, 5 * mib);
    EXPECT_EQ(take().reserved, 8 * mib);
    EXPECT_EQ(take().peak, 9 * mib);

    row["memory"] = {{"measured", {{"device", {{"serving_peak", 20 * mib}}}}}};
    EXPECT_EQ(take().peak, 20 * mib) << "of the whole process";
}

TEST(TopSampler, ReadsTheLedgerWhereThereIsOne) {
    Sampler sampler;
    json::value memory = {{"devices",
                           {{{"device", "cpu"},
                             {"total", 1000 * mib},
                             {"limit", 600 * mib},
                             {"margin", 0},
                             {"foreign", 500 * mib},
                             {"workers",
                              {{{"model", "a"}, {"holds", "resident"}, {"bytes", 200 * mib}},
                               {{"model", "b"}, {"holds", "reserved"}, {"bytes", 100 * mib}}}}}}}};
    const DeviceRow cpu = sampler.take({status(0), memory, {}}, {5 * mib, mib}, 0).devices.at(0);
    EXPECT_EQ(cpu.sum(Part::Kind::resident), 200 * mib);
    EXPECT_EQ(cpu.sum(Part::Kind::reserved), 100 * mib);
    EXPECT_EQ(cpu.crowding(cpu.others), 100 * mib) << "500 of others, 400 of it beside the limit";
    EXPECT_EQ(cpu.free(), 200 * mib);

    json::object& ledger = memory.at("devices").at(0).as_object();
    ledger["margin"] = 50 * mib, ledger["promised"] = 100 * mib, ledger["foreign"] = 300 * mib;
    ledger["blanks"] = 60 * mib;
    const DeviceRow fuller = sampler.take({status(0), memory, {}}, {}, 0).devices.at(0);
    EXPECT_EQ(fuller.used(), 360 * mib);
    EXPECT_EQ(fuller.crowding(fuller.others + fuller.kept()), 50 * mib)
        << "450 not for the daemon, 400 of it beside the limit";
    EXPECT_EQ(fuller.free(), 190 * mib);
}

TEST(TopSampler, WithoutALedgerOthersAreWhatIsUsedBesideTheWorkers) {
    Sampler sampler;
    const Snapshot now = sampler.take({status(0), {}, {}}, {1000 * mib, 300 * mib}, 0);
    ASSERT_EQ(now.devices.size(), 1U);
    EXPECT_EQ(now.devices[0].sum(Part::Kind::resident), 100 * mib);
    EXPECT_EQ(now.devices[0].others, 600 * mib);
    const json::value memory = json::object{{"blanks_on_host", 60 * mib}};
    const DeviceRow cpu = sampler.take({status(0), memory, {}}, {1000 * mib, 300 * mib}, 0).devices.at(0);
    EXPECT_EQ(cpu.blanks, 60 * mib);
    EXPECT_EQ(cpu.others, 540 * mib);
}

TEST(TopSampler, TakesAGpusSensorsAndTrouble) {
    Sampler sampler;
    const json::value gpus = {{"gpus",
                               {{{"index", 1},
                                 {"name", "A"},
                                 {"state", "lost: GPU is lost"},
                                 {"quarantined", nullptr},
                                 {"total_bytes", 10 * mib},
                                 {"free_bytes", 4 * mib},
                                 {"clock_mhz", 1980},
                                 {"power_w", 310.5},
                                 {"throttled", {"power cap"}}}}}};
    const Snapshot now = sampler.take({json::object{}, {}, gpus}, {}, 0);
    ASSERT_EQ(now.devices.size(), 1U);
    EXPECT_EQ(now.devices[0].name, "cuda:1");
    EXPECT_EQ(now.devices[0].trouble, "lost: GPU is lost");
    EXPECT_EQ(now.devices[0].clock_mhz, 1980.0);
    EXPECT_THAT(now.devices[0].throttled, ElementsAre("power cap"));
}

TEST(TopSampler, OfAnswersThatAreNoneMakesAnEmptySnapshot) {
    Sampler sampler;
    for (const json::value& nonsense : {json::value{}, json::value{7}, json::value{{"models", 3}, {"devices", "x"}}}) {
        const Snapshot now = sampler.take({nonsense, nonsense, nonsense}, {}, 0);
        EXPECT_THAT(now.workers, IsEmpty());
        EXPECT_THAT(now.devices, IsEmpty());
    }
}

TEST(TopBar, SharesAreAtLeastAColumnAndNeverMoreThanThereAre) {
    EXPECT_THAT(share_out({50, 25, 0}, 100, 20), ElementsAre(10, 5, 0));
    EXPECT_THAT(share_out({1, 1, 98}, 100, 10), ElementsAre(1, 1, 8));
    EXPECT_THAT(share_out({300, 1}, 100, 10), ElementsAre(9, 1)) << "more than the limit, when it was lowered";
    EXPECT_THAT(share_out({5, 5}, 0, 10), ElementsAre(0, 0)) << "a device of unknown size";
    EXPECT_THAT(share_out(std::vector<std::uint64_t>(30, 1), 30, 10), testing::Each(testing::Le(1U)));
}

TEST(TopBar, ShowsWhoseEachPartIs) {
    DeviceRow device;
    device.total = device.limit = 100;
    device.others = 20;
    device.parts = {{Part::Kind::resident, "minilm", 30}, {Part::Kind::reserved, "b", 10}};
    EXPECT_EQ(bar_of(device, 40, Fills::of(false, false), false).text(), "=minilm=====+b++................#others#");
    EXPECT_EQ(bar_of(device, 20, Fills::of(false, true), true).text(), "█min…█▒▒········▞o…▞");
    device.blanks = 20;
    device.promised = 15;
    EXPECT_EQ(bar_of(device, 40, Fills::of(false, false), false).text(), "=minilm=====+b++-blanks-..:kept:#others#");
}

TEST(TopNumbers, AreShort) {
    EXPECT_EQ(size_text(0), "0");
    EXPECT_EQ(size_text(512 * mib), "512M");
    EXPECT_EQ(size_text(1536 * mib), "1.5G");
    EXPECT_EQ(size_text(1000 * mib), "1.0G");
    EXPECT_EQ(rate_text(0.5), "0.5");
    EXPECT_EQ(rate_text(12'345), "12.3k");
    EXPECT_EQ(latency_text(0.42), "0.42ms");
    EXPECT_EQ(latency_text(1530), "1.53s");
    EXPECT_EQ(span_text(-5), "0s");
    EXPECT_EQ(span_text(150'000), "2m");
}

}  // namespace
}  // namespace bulkhead::cli::top

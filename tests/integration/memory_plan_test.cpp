// More models than memory: who stays is decided by what was measured, and room is made by unloads
// that were seen to end.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include "tests/support/daemon/daemon.h"
#include "tests/support/daemon/fleets.h"
#include "tests/support/daemon/sanitizer.h"

namespace bulkhead::test {
namespace {

using namespace std::chrono_literals;
using testing::HasSubstr;
namespace json = boost::json;

/// A model that holds 100 MiB, and says that it needs 110.
std::string holder(const std::string& name, const std::string& extra = {}, const std::string& environment = {}) {
    return minimal_model(name, "MINIMAL_BALLAST_BYTES: \"104857600\"" + (environment.empty() ? "" : ", " + environment),
                         "memory: 110MiB\nmin_resident: 1ms\n" + extra);
}

/// Room for one of them and a half.
constexpr const char* one_and_a_half = "limits: {cpu: {share: 165MiB}}\n";

/// What a load of `model` would do, once the millisecond of `min_resident` is over.
json::value plan_of(const Daemon& daemon, const std::string& model) {
    const auto deadline = std::chrono::steady_clock::now() + 10s;
    auto plan = daemon.call("fleet.plan", {{"model", model}}).value();
    while (plan.at("outcome").as_string() == "waits" && std::chrono::steady_clock::now() < deadline)
        plan = daemon.call("fleet.plan", {{"model", model}}).value();
    return plan;
}

/// Whether this part of what the model holds was measured.
auto has_measured(const char* part) {
    return [part](const json::object& row) {
        const auto& measured = row.at("memory").at("measured");
        return measured.is_object() && measured.at("device").at(part).to_number<std::uint64_t>() > 0;
    };
}

json::object memory_of_cpu(const Daemon& daemon) {
    const auto answer = daemon.call("fleet.memory").value();
    for (const json::value& device : answer.at("devices").as_array())
        if (device.at("device").as_string() == "cpu") return device.as_object();
    return {};
}

TEST(MemoryPlan, ALoadUnloadsWhoIsIdle) {
    Daemon daemon{fleet({holder("a"), holder("b")}) + one_and_a_half, minimal()};
    ASSERT_TRUE(daemon.load("a"));

    const auto plan = plan_of(daemon, "b");
    EXPECT_EQ(plan.at("outcome").as_string(), "evicts") << json::serialize(plan);
    EXPECT_EQ(plan.at("evicts").at(0).at("model").as_string(), "a");
    EXPECT_EQ(daemon.state("a"), "ready") << "a plan does nothing";

    ASSERT_TRUE(daemon.load("b")) << daemon.why("b");
    EXPECT_EQ(daemon.state("a"), "stopped");
    EXPECT_THAT(daemon.why("a"), HasSubstr("b needs its place")) << "for whom it went";
    const auto why = daemon.call("model.why", {{"model", "a"}}).value();
    const json::value& receipt = why.at("replicas").at(0).at("receipt");
    EXPECT_EQ(receipt.at("ended").as_string(), "drained") << json::serialize(why);
    EXPECT_GE(receipt.at("host_bytes").to_number<std::uint64_t>(), 100u << 20);
    EXPECT_THAT(daemon.why("b"), HasSubstr("its only device; a/0 went for it"));
    const json::object books = memory_of_cpu(daemon);  // once: they change when it was measured
    const json::array& workers = books.at("workers").as_array();
    ASSERT_EQ(workers.size(), 1u) << json::serialize(workers);
    EXPECT_EQ(workers[0].at("model").as_string(), "b");
    EXPECT_EQ(workers[0].at("bytes"), books.at("resident")) << "the parts are the sum";
    EXPECT_LE(books.at("resident").to_number<std::uint64_t>(), 165u << 20);
}

TEST(MemoryPlan, APinnedModelStays) {
    Daemon daemon{fleet({holder("a"), holder("b")}) + one_and_a_half, minimal()};
    ASSERT_TRUE(daemon.load("a"));
    ASSERT_TRUE(daemon.call("model.pin", {{"model", "a"}}));

    EXPECT_FALSE(daemon.call("model.load", {{"model", "b"}, {"deadline_ms", 500}}));
    EXPECT_EQ(daemon.state("a"), "ready");

    ASSERT_TRUE(daemon.call("model.pin", {{"model", "a"}, {"pin", false}}));
    EXPECT_TRUE(daemon.load("b"));
}

TEST(MemoryPlan, OthersGetRoomWithReceipts) {
    Daemon daemon{fleet({holder("a"), holder("b")}) + one_and_a_half, minimal()};
    ASSERT_TRUE(daemon.load("a"));
    ASSERT_EQ(plan_of(daemon, "b").at("outcome").as_string(), "evicts") << "`a` may go by now";
    const std::uint64_t all = memory_of_cpu(daemon).at("total").to_number<std::uint64_t>();

    const auto made = daemon.call("fleet.reclaim", {{"device", "cpu"}, {"bytes", all}, {"client", "game"}});
    ASSERT_TRUE(made) << made.error().text();
    ASSERT_EQ(made->at("receipts").as_array().size(), 1u) << json::serialize(*made);
    EXPECT_TRUE(made->at("receipts").at(0).at("verified").as_bool());
    EXPECT_GE(made->at("freed").to_number<std::uint64_t>(), 100u << 20);
    EXPECT_FALSE(made->at("short_of").as_string().empty()) << "the machine itself uses some";
}

TEST(MemoryPlan, WhatWasMeasuredPlansTheNextLoad) {
    Daemon daemon{fleet({minimal_model("a", "MINIMAL_BALLAST_BYTES: \"104857600\"", "min_resident: 1ms\n")}) +
                      one_and_a_half,
                  minimal()};
    ASSERT_TRUE(daemon.load("a"));
    {
        auto channel = daemon.open("a").value();
        EXPECT_TRUE(infer_float(channel, "x", four, dims_four));
        EXPECT_TRUE(daemon.wait_until("a", has_measured("slabs")));  // as the worker tells it
    }
    ASSERT_TRUE(daemon.unload("a"));
    const auto plan = daemon.call("fleet.plan", {{"model", "a"}}).value();
    ASSERT_EQ(plan.at("loads").as_array().size(), 1u);
    EXPECT_EQ(plan.at("loads").at(0).at("basis").as_string(), "measured");
    EXPECT_NEAR(plan.at("loads").at(0).at("bytes").to_number<double>(), 100 << 20, (is_sanitized ? 80 : 20) << 20);
    const auto measured = daemon.row("a").at("memory").at("measured");
    EXPECT_EQ(measured.at("count").to_number<int>(), 1);
    EXPECT_TRUE(daemon.row("a").at("memory").at("exceeded").is_null()) << "nothing was estimated";
}

TEST(MemoryPlan, AReloadOfItsKeysRestartsNoWorker) {
    Daemon daemon{fleet({holder("a"), holder("b")}) + one_and_a_half, minimal()};
    ASSERT_TRUE(daemon.load("a"));
    const pid_t worker = daemon.pid("a");
    const std::string keys = "pin: true\npriority: 90\nkeep_alive: 1h\nreplicas: {min: 1, max: 2}\n"
                             "group: {name: voices, kind: exclusive}\n";
    const std::string changed = minimal_model("a", "MINIMAL_BALLAST_BYTES: \"104857600\"",
                                              "memory: 112MiB\nmin_resident: 2s\ndevice: [cuda:0, cpu]\n" + keys);
    daemon.folder().write("fleet.yaml", fleet({changed, holder("b")}) +
                                            "limits: {cpu: {share: 120MiB, margin: 1MiB}}\nstartup: [a]\n");
    ASSERT_TRUE(daemon.call("fleet.reload"));
    ASSERT_TRUE(daemon.wait_state("a", "ready")) << "the next supervisor has adopted it";
    EXPECT_EQ(daemon.pid("a"), worker);
    EXPECT_TRUE(daemon.row("a").at("pinned").as_bool());
    EXPECT_EQ(memory_of_cpu(daemon).at("limit").to_number<std::uint64_t>(), 120u << 20);
    const auto refused = daemon.load("b");
    ASSERT_FALSE(refused);
    EXPECT_THAT(refused.error().remedy, HasSubstr("unpin a"));
}

TEST(MemoryPlan, TheLedgerSurvivesTheSupervisor) {
    Daemon daemon{fleet({holder("a"), holder("b")}) + "limits: {cpu: {share: 400MiB}}\n", minimal()};
    ASSERT_TRUE(daemon.load("a"));
    ASSERT_TRUE(daemon.load("b"));
    // Until each is measured while it serves, the books may hold the 110 MiB that were declared.
    for (const char* name : {"a", "b"}) ASSERT_TRUE(daemon.wait_until(name, has_measured("serving_peak")));
    auto before = memory_of_cpu(daemon);
    const auto bound = daemon.row("a").at("memory_bound");

    const pid_t former = supervisor_of(daemon);
    ::kill(former, SIGKILL);
    ASSERT_TRUE(daemon.wait_until("b", [&](const json::object& row) {
        return row.at("state").as_string() == "ready" && supervisor_of(daemon) != former;
    }));

    auto after = memory_of_cpu(daemon);
    for (const char* part : {"limit", "margin", "reserved", "reclaiming"})
        EXPECT_EQ(before.at(part), after.at(part)) << part;
    EXPECT_EQ(daemon.row("a").at("memory_bound"), bound) << "the kernel's";
    EXPECT_NEAR(before.at("resident").to_number<double>(), after.at("resident").to_number<double>(), 1 << 20);
}

TEST(MemoryPlan, ALeakEndsItsOwnModelAlone) {
    Daemon daemon{fleet({minimal_model("leaky", "EVIL_RUN: leak", "memory: 64MiB\nrestart: never\n"), holder("a")}),
                  minimal()};
    ASSERT_TRUE(daemon.load("a"));
    ASSERT_TRUE(daemon.load("leaky"));
    if (daemon.row("leaky").at("memory_bound").is_null()) GTEST_SKIP() << "no memory cgroup that this user may limit";
    const pid_t neighbour = daemon.pid("a");
    auto channel = daemon.open("leaky").value();

    EXPECT_FALSE(infer_float(channel, "x", four, dims_four));

    EXPECT_THAT(json::serialize(daemon.crash_of("leaky")), HasSubstr("out_of_memory"));
    EXPECT_THAT(daemon.why("leaky"), HasSubstr("out_of_memory"));
    EXPECT_EQ(daemon.pid("a"), neighbour);
    EXPECT_EQ(daemon.state("a"), "ready");
}

TEST(MemoryPlan, TheBoundOfAProcessIsWithinTheShareOfAllModels) {
    Daemon daemon{fleet({minimal_model("large", "", "memory: 150MiB\n"), minimal_model("unknown")}) + one_and_a_half,
                  minimal()};
    ASSERT_TRUE(daemon.load("large"));
    if (daemon.row("large").at("memory_bound").is_null()) GTEST_SKIP() << "no memory cgroup that this user may limit";
    // The margin, libraries, and the model's file, which is the program here: 28 MiB more
    // under a sanitizer.
    const std::uint64_t beside = (80u << 20) + std::filesystem::file_size(minimal_programs() / "bulkhead-worker");
    EXPECT_LE(daemon.row("large").at("memory_bound").to_number<std::uint64_t>(), (165u << 20) + beside);
    ASSERT_TRUE(daemon.load("unknown")) << daemon.why("unknown");
    EXPECT_LE(daemon.row("unknown").at("memory_bound").to_number<std::uint64_t>(), (165u << 20) + beside);
}

}  // namespace
}  // namespace bulkhead::test

// Fault 25, step by step: the supervisor is SIGKILLed at the first packet that it sends for a
// load, at the second, and so on until a load goes through undisturbed; likewise for an unload and
// for an adoption.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <cstdio>
#include <optional>

#include "tests/faults/step_killer.h"
#include "tests/support/daemon/daemon.h"
#include "tests/support/daemon/fleets.h"

namespace bulkhead::test {
namespace {

namespace json = boost::json;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

/// Far more packets than any of the three takes: then something sends for ever.
constexpr int steps_max = 200;

/// A daemon whose supervisors are killed at a step, with one model that loads and captures at once.
struct Victim {
    StepKiller killer;
    std::optional<Daemon> daemon;

    Victim() {
        SpawnOptions options;
        options.programs = minimal_programs();
        options.in_child = [this] { killer.install_in_child(); };
        daemon.emplace(fleet({minimal_model("m", "MINIMAL_LOAD_STEPS: \"0\", MINIMAL_CAPTURE: \"3\"")}), options);
    }
    [[nodiscard]] pid_t supervisor() const {
        const auto answer = daemon->call("daemon.ping");
        return answer ? static_cast<pid_t>(answer->at("supervisor_pid").as_int64()) : -1;
    }
    /// Processes that carry the mark of a worker of this daemon.
    [[nodiscard]] std::vector<pid_t> workers() const {
        const auto carriers = pids_with_environment("BULKHEAD_WORKER=");
        auto found = pids_with_environment("BULKHEAD_SOCKET=" + daemon->socket().string());
        std::erase_if(found, [&](pid_t pid) { return std::ranges::find(carriers, pid) == carriers.end(); });
        return found;
    }
};

class Fault25Step : public testing::Test {
protected:
    /// Runs `attempt` with a victim for each step until no kill comes before it is done.
    template <typename Attempt>
    void at_each_step(int steps_min, Attempt attempt) {
        if (!StepKiller::refusal().empty()) GTEST_SKIP() << "not permitted here: " << StepKiller::refusal();
        for (int step = 1; step < steps_max; ++step) {
            SCOPED_TRACE("killed at packet " + std::to_string(step));
            Victim victim;
            ASSERT_TRUE(victim.killer.works());
            attempt(victim, step);
            if (HasFailure()) return;
            if (victim.killer.killed() == -1) {
                EXPECT_GT(step, steps_min) << "fewer packets than changes of state";
                std::printf("killed at each of %d packets\n", step - 1);
                return;
            }
            EXPECT_TRUE(wait_gone(victim.killer.killed()));
        }
        ADD_FAILURE() << "it was never left alone";
    }
};

TEST_F(Fault25Step, OfALoadWithACaptureItIsAnsweredAndHasOneProcess) {
    at_each_step(6, [](Victim& victim, int step) {
        victim.killer.kill_at(step);

        const auto loaded = victim.daemon->load("m");

        ASSERT_TRUE(loaded) << loaded.error().text();
        ASSERT_TRUE(victim.daemon->wait_state("m", "ready"));
        EXPECT_THAT(victim.workers(), ElementsAre(victim.daemon->pid("m")));
        auto channel = victim.daemon->open("m");
        ASSERT_TRUE(channel) << channel.error().text();
        EXPECT_TRUE(infer_float(*channel, "x", four, dims_four));
    });
}

TEST_F(Fault25Step, OfAnUnloadItGetsItsReceiptAndLeavesNoProcess) {
    at_each_step(4, [](Victim& victim, int step) {
        ASSERT_TRUE(victim.daemon->load("m"));
        const pid_t worker = victim.daemon->pid("m");
        victim.killer.kill_at(step);

        const auto receipt = victim.daemon->unload("m");

        ASSERT_TRUE(receipt) << receipt.error().text();
        EXPECT_EQ(receipt->at("pid").as_int64(), worker);
        EXPECT_TRUE(receipt->at("verified").as_bool()) << json::serialize(*receipt);
        // Killed between the answer and the end of the record: the next supervisor looks for
        // remains once more.
        EXPECT_TRUE(victim.daemon->wait_state("m", "stopped"));
        EXPECT_THAT(victim.workers(), IsEmpty());
    });
}

TEST_F(Fault25Step, OfAnAdoptionTheWorkerServesOnAndIsAdoptedByTheNext) {
    at_each_step(3, [](Victim& victim, int step) {
        ASSERT_TRUE(victim.daemon->load("m"));
        const pid_t worker = victim.daemon->pid("m");
        auto channel = victim.daemon->open("m").value();
        const pid_t first = victim.supervisor();
        victim.killer.kill_at(step, first);
        ::kill(first, SIGKILL);

        EXPECT_TRUE(infer_float(channel, "x", four, dims_four)) << "with no supervisor, or a dying one";
        ASSERT_TRUE(victim.daemon->load("m"));  // answered when it is adopted

        EXPECT_THAT(victim.workers(), ElementsAre(worker));
        EXPECT_EQ(victim.daemon->pid("m"), worker);
        EXPECT_TRUE(infer_float(channel, "x", four, dims_four));
    });
}

}  // namespace
}  // namespace bulkhead::test

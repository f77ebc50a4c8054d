#pragma once

#include "tests/support/open_descriptors.h"
#include "tests/support/worker/slab_harness.h"

namespace bulkhead::worker::test {

/// Clients of one worker that die after each of their steps. This process is both: what it has is
/// what the worker has.
class DeathTest : public SlabTest {
protected:
    struct Step {
        const char* name;
        std::function<void(TestClient&)> take;
        bool runs = false;  ///< after it, a request of the method "wait" is at its gate
    };
    static Step receive_one(const char* name, bool runs = false) {
        return {name, [](TestClient& client) { ASSERT_TRUE(client.receive()); }, runs};
    }
    /// Hello, and what follows it: rings where the tests run over them, and the two slabs.
    static std::vector<Step> opening(std::uint64_t features, const wire::GpuUuid& gpu = {}) {
        const bool rings = bulkhead::test::over_rings();
        if (rings) features |= wire::feature_rings;
        std::vector<Step> steps{{"hello",
                                 [=](TestClient& client) {
                                     client.send(channel::encode(channel::Hello{features, "mortal", gpu}));
                                 }},
                                receive_one("welcome")};
        if (rings) steps.push_back({"its rings", [](TestClient& client) { client.accept_rings(); }});
        steps.push_back(receive_one("its input slab"));
        steps.push_back(receive_one("its output slab"));
        return steps;
    }

    /// One client for each number of steps. The neighbour is served after each, and nothing of the
    /// dead one is left.
    void die_after_each(const std::vector<Step>& steps) {
        TestClient neighbour = open_channel();
        const std::size_t slabs_before = slabs_mapped();
        const std::size_t descriptors_before = bulkhead::test::open_descriptors();
        for (std::size_t taken = 0; taken <= steps.size(); ++taken) {
            SCOPED_TRACE(taken == 0 ? "before its first step" : steps[taken - 1].name);
            {
                TestClient client = introduce();
                for (std::size_t i = 0; i < taken; ++i) steps[i].take(client);

                client.close();

                // The worker ends what it has begun.
                if (taken > 0 && steps[taken - 1].runs) log->gate.let_one_pass();
                EXPECT_EQ(number(expect_said("channel_closed"), "channel"), client.id);
            }
            EXPECT_EQ(neighbour.values(neighbour.echo(taken + 1, 7).tensors.at(0)), (std::vector<float>{7}));
            neighbour.echo(1000 + taken, 8);
            EXPECT_EQ(slabs_mapped(), slabs_before);
            EXPECT_EQ(bulkhead::test::open_descriptors(), descriptors_before);
            if (HasFatalFailure()) return;
        }
    }

private:
    static std::size_t slabs_mapped() {
        return bulkhead::test::mappings("/memfd:bulkhead:") + bulkhead::test::mappings("/memfd:fake-cuda ");
    }
};

}  // namespace bulkhead::worker::test

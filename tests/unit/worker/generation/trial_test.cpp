#include "worker/generation/engine.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/worker/fake_engine.h"

namespace bulkhead::worker::generation {
namespace {

using test::FakeEngine;
using testing::ElementsAre;
using testing::IsEmpty;

TEST(Trial, StepsEachNumberOfSequencesAndLeavesEverySlotReset) {
    FakeEngine engine{FakeEngine::usual()};
    ASSERT_TRUE(try_once(engine, 0));
    EXPECT_THAT(engine.calls,
                ElementsAre("reset 0 0", "reset 1 0", "reset 2 0", "reset 3 0", "prefill 0 0+2", "launch 1", "collect",
                            "launch 2", "collect", "launch 4", "collect", "reset 0 0", "reset 1 0", "reset 2 0",
                            "reset 3 0"));
    EXPECT_THAT(engine.faults, IsEmpty());
}

/// Memory for it is then there, or the load says that it is not.
TEST(Trial, ComputesTheEndOfTheLongestPromptFirst) {
    Shape shape = FakeEngine::usual();
    shape.prefill_gives = true;
    for (const std::uint32_t chunk : {1U, 10U, 16U, 500U}) {
        FakeEngine engine{shape};
        ASSERT_TRUE(try_once(engine, chunk));
        const std::uint32_t count = std::min(chunk, shape.chunk_max);
        ASSERT_GT(engine.calls.size(), 8U);
        EXPECT_EQ(engine.calls[0], fmt::format("reset 0 {}", shape.length - count));
        EXPECT_EQ(engine.calls[1], fmt::format("prefill 0 {}+{}", shape.length - count, count));
        EXPECT_EQ(engine.calls[2], "reset 0 0");
        EXPECT_EQ(engine.calls[7], "collect") << "of the short prompt, which ends; the long one gives nothing";
    }
    FakeEngine engine{shape};
    engine.fails = "prefill";
    EXPECT_FALSE(try_once(engine, 16));
    EXPECT_EQ(engine.calls.size(), 2U);
}

/// Weights that are not numbers, say. It would answer nothing, so it is not called ready.
TEST(Trial, RefusesAModelWhoseLogitsAreNotFinite) {
    Shape shape = FakeEngine::usual();
    const auto tried = [&shape] {
        FakeEngine engine{shape};
        const std::vector<std::int64_t> trial(3, 0);  // a prompt of two, and what the
                                                      // first step reads
        engine.not_finite_after = FakeEngine::next(trial, shape, {}, 0);
        return try_once(engine, 0);
    };
    const auto refused = tried();
    ASSERT_FALSE(refused);
    EXPECT_EQ(refused.error().code, ErrorCode::package_incompatible);
    EXPECT_THAT(refused.error().attempt, testing::HasSubstr("logits are not finite"));
    EXPECT_THAT(refused.error().remedy, testing::HasSubstr("bulkhead.export --check"));
    shape.embeddings = true;
    EXPECT_TRUE(tried()) << "embeddings of zeros are not a prompt";
}

}  // namespace
}  // namespace bulkhead::worker::generation

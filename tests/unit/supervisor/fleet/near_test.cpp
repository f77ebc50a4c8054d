/// Whose files are kept in the page cache.

#include "supervisor/fleet/weights_near.h"
#include "tests/unit/supervisor/memory/policy_fixture.h"

namespace bulkhead::simulation {
namespace {

using supervisor::choose_near, supervisor::NearCandidate;

NearCandidate used(const std::string& name, Bytes bytes, std::int64_t unloaded_ms) {
    return {name, bytes, false, false, unloaded_ms};
}

TEST(MemoryNear, KeepsWhoAskedThenWhoWasUnloadedLast) {
    NearCandidate asked{"asked", 4 * gib, true, false, 0};
    EXPECT_THAT(choose_near({used("older", gib, 1), used("later", 2 * gib, 2), asked}, 7 * gib),
                ElementsAre("asked", "later", "older"));
    EXPECT_THAT(choose_near({used("older", gib, 1), used("later", 2 * gib, 2), asked}, 6 * gib),
                ElementsAre("asked", "later"));
}

TEST(MemoryNear, TakesASmallerOneWhereALargerDoesNotFit) {
    EXPECT_THAT(choose_near({used("large", 5 * gib, 2), used("small", gib, 1)}, 4 * gib), ElementsAre("small"));
    EXPECT_THAT(choose_near({used("small", gib, 1)}, 0), IsEmpty());
}

TEST(MemoryNear, LeavesOutWhoIsLoadedAndWhoWasNeverLoaded) {
    NearCandidate loaded{"loaded", gib, true, true, 3};
    NearCandidate unused{"unused", gib, false, false, 0};
    EXPECT_THAT(choose_near({loaded, unused, used("idle", gib, 2)}, 8 * gib), ElementsAre("idle"));
}

}  // namespace
}  // namespace bulkhead::simulation

/// Whose files are kept in the page cache.

#include "supervisor/fleet/weights_near.h"
#include "tests/unit/supervisor/memory/policy_fixture.h"

namespace bulkhead::simulation {
namespace {

using supervisor::choose_near, supervisor::NearCandidate;

TEST(MemoryNear, KeepsWhoAskedThenWhoWasUnloadedLastAsFarAsTheyFit) {
    const std::vector<NearCandidate> all{{.model = "older", .bytes = gib, .unloaded_ms = 1},
                                         {.model = "later", .bytes = 2 * gib, .unloaded_ms = 2},
                                         {.model = "asked", .bytes = 4 * gib, .asked = true},
                                         {.model = "loaded", .bytes = gib, .asked = true, .loaded = true, .unloaded_ms = 3},
                                         {.model = "never loaded", .bytes = gib}};
    EXPECT_THAT(choose_near(all, 7 * gib), ElementsAre("asked", "later", "older"));
    EXPECT_THAT(choose_near(all, 6 * gib), ElementsAre("asked", "later"));
    EXPECT_THAT(choose_near(all, 5 * gib), ElementsAre("asked", "older")) << "a smaller one, where a larger does not fit";
    EXPECT_THAT(choose_near(all, 0), IsEmpty());
}

}  // namespace
}  // namespace bulkhead::simulation

#include "supervisor/replica/lifecycle.h"

#include <map>
#include <set>

#include <gtest/gtest.h>

namespace bulkhead::supervisor {
namespace {

using S = WorkerState;
using E = WorkerEvent;

/// Written down by hand, from the design, not from the code.
const std::map<std::pair<S, E>, S> edges{
    {{S::stopped, E::spawn_asked}, S::spawning},
    {{S::stopped, E::found}, S::adopting},
    {{S::adopting, E::said_hello}, S::loading},
    {{S::adopting, E::became_ready}, S::ready},
    {{S::adopting, E::stop_asked}, S::stopping},
    {{S::adopting, E::lost}, S::crashed},
    {{S::adopting, E::restart_planned}, S::backoff},
    {{S::adopting, E::gave_up}, S::quarantined},
    {{S::spawning, E::said_hello}, S::loading},
    {{S::spawning, E::stop_asked}, S::stopping},
    {{S::spawning, E::lost}, S::crashed},
    {{S::loading, E::capture_began}, S::capturing},
    {{S::loading, E::became_ready}, S::ready},
    {{S::loading, E::stop_asked}, S::stopping},
    {{S::loading, E::lost}, S::crashed},
    {{S::capturing, E::became_ready}, S::ready},
    {{S::capturing, E::stop_asked}, S::stopping},
    {{S::capturing, E::lost}, S::crashed},
    {{S::ready, E::became_busy}, S::busy},
    {{S::ready, E::drain_asked}, S::draining},
    {{S::ready, E::lost}, S::crashed},
    {{S::busy, E::became_idle}, S::ready},
    {{S::busy, E::drain_asked}, S::draining},
    {{S::busy, E::lost}, S::crashed},
    {{S::draining, E::stop_asked}, S::stopping},
    {{S::draining, E::lost}, S::crashed},
    {{S::stopping, E::exited}, S::reclaiming},
    {{S::crashed, E::exited}, S::reclaiming},
    {{S::reclaiming, E::reclaimed}, S::stopped},
    {{S::reclaiming, E::restart_planned}, S::backoff},
    {{S::reclaiming, E::gave_up}, S::quarantined},
    {{S::backoff, E::spawn_asked}, S::spawning},
    {{S::backoff, E::stop_asked}, S::stopped},
    {{S::quarantined, E::lifted}, S::stopped},
};

TEST(Lifecycle, HasExactlyTheEdgesOfTheDesign) {
    for (int s = 0; s < worker_state_count; ++s) {
        for (int e = 0; e < worker_event_count; ++e) {
            const auto state = static_cast<S>(s);
            const auto event = static_cast<E>(e);
            const auto expected = edges.find({state, event});
            const auto to = next(state, event);
            ASSERT_EQ(to.has_value(), expected != edges.end()) << to_string(state) << " by event " << e;
            if (to) {
                EXPECT_EQ(*to, expected->second) << to_string(state) << " by event " << e;
            }
        }
    }
}

TEST(Lifecycle, EveryStateIsReachableAndLeadsBackToStopped) {
    const auto reachable_from = [](S start) {
        std::set<S> seen{start};
        for (bool grown = true; grown;) {
            grown = false;
            for (const auto& [edge, to] : edges)
                if (seen.contains(edge.first) && seen.insert(to).second) grown = true;
        }
        return seen;
    };
    EXPECT_EQ(reachable_from(S::stopped).size(), static_cast<std::size_t>(worker_state_count));
    for (int s = 0; s < worker_state_count; ++s) EXPECT_TRUE(reachable_from(static_cast<S>(s)).contains(S::stopped));
}

TEST(Lifecycle, EachStateHasItsOwnName) {
    std::set<std::string_view> names;
    for (int s = 0; s < worker_state_count; ++s) names.insert(to_string(static_cast<S>(s)));
    EXPECT_EQ(names.size(), static_cast<std::size_t>(worker_state_count));
    EXPECT_FALSE(names.contains("unknown"));
}

}  // namespace
}  // namespace bulkhead::supervisor

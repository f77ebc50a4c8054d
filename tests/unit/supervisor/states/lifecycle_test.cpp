#include "supervisor/states/lifecycle.h"

#include <cstddef>
#include <fstream>
#include <set>
#include <sstream>
#include <string>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "supervisor/replica/termination.h"

namespace bulkhead::supervisor {
namespace {

using S = WorkerState;

std::string operations_page() {
    std::ostringstream page;
    page << std::ifstream{BULKHEAD_SOURCE_DIR "/docs/operations.md"}.rdbuf();
    return page.str();
}

static_assert(harder(Escalation::none, Escalation::sigterm) == Escalation::sigterm);
static_assert(harder(Escalation::none, Escalation::sigkill) == Escalation::sigkill, "nobody asked it to end");
static_assert(harder(Escalation::sigterm, Escalation::sigterm) == Escalation::sigkill);
static_assert(harder(Escalation::sigkill, Escalation::sigterm) == Escalation::sigkill_past_keeper);
static_assert(!harder(Escalation::sigkill_past_keeper, Escalation::sigterm), "a person is told");

constexpr bool keeps_lock(WorkerState state, Grant grant, FirstSign sign) {
    return use_of_lock(state, grant, sign) == LockUse::keep;
}
static_assert(use_of_lock(S::loading, Grant::awaited, FirstSign::none) == LockUse::grant);
static_assert(use_of_lock(S::capturing, Grant::owed, FirstSign::none) == LockUse::grant);
static_assert(use_of_lock(S::draining, Grant::given, FirstSign::none) == LockUse::drain);
static_assert(use_of_lock(S::stopping, Grant::awaited, FirstSign::none) == LockUse::pass_on, "it has no memory");
static_assert(keeps_lock(S::crashed, Grant::awaited, FirstSign::end), "until its memory is back");
static_assert(keeps_lock(S::crashed, Grant::given, FirstSign::dying));
static_assert(keeps_lock(S::loading, Grant::none, FirstSign::none), "adopted, and has not asked");

TEST(Lifecycle, TheOperationsPageExplainsEachState) {
    const std::string page = operations_page();
    const std::size_t begin = page.find("| state | means |");
    const std::size_t end = page.find("\n\n", begin);
    ASSERT_NE(begin, std::string::npos);
    ASSERT_NE(end, std::string::npos);
    const std::string table = page.substr(begin, end - begin);
    for (const std::string_view state : worker_state_names)
        EXPECT_NE(table.find(fmt::format("\n| `{}` | ", state)), std::string::npos) << state;
}

TEST(Lifecycle, EveryStateIsReachableAndLeadsBackToStopped) {
    const auto reachable_from = [](S start) {
        std::set<S> seen{start};
        for (bool grown = true; grown;) {
            grown = false;
            for (int s = 0; s < worker_state_count; ++s)
                for (const auto& to : transitions.at(static_cast<std::size_t>(s)))
                    if (to && seen.contains(static_cast<S>(s)) && seen.insert(*to).second) grown = true;
        }
        return seen;
    };
    EXPECT_EQ(reachable_from(S::stopped).size(), static_cast<std::size_t>(worker_state_count));
    for (int s = 0; s < worker_state_count; ++s) EXPECT_TRUE(reachable_from(static_cast<S>(s)).contains(S::stopped));
}

TEST(Lifecycle, EachStateAndEventHasItsOwnName) {
    const std::set<std::string_view> states{worker_state_names.begin(), worker_state_names.end()};
    EXPECT_EQ(states.size(), static_cast<std::size_t>(worker_state_count));
    EXPECT_FALSE(states.contains(""));
    const std::set<std::string_view> events{worker_event_names.begin(), worker_event_names.end()};
    EXPECT_EQ(events.size(), static_cast<std::size_t>(worker_event_count));
    EXPECT_FALSE(events.contains(""));
}

}  // namespace
}  // namespace bulkhead::supervisor

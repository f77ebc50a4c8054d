#include "worker/torch/inference_threads.h"

#include <omp.h>
#include <sched.h>

#include <set>
#include <thread>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace bulkhead::worker {
namespace {

using Cores = std::set<int>;

Cores cores_of_this_thread() {
    cpu_set_t set;
    CPU_ZERO(&set);
    Cores cores;
    if (::sched_getaffinity(0, sizeof set, &set) != 0) return cores;
    for (int core = 0; core < CPU_SETSIZE; ++core)
        if (CPU_ISSET(core, &set)) cores.insert(core);
    return cores;
}

/// The cores of each thread of a team of so many, after `bind_team`.
std::vector<Cores> bound(int count) {
    std::vector<Cores> all(static_cast<std::size_t>(count));
    std::jthread{[&] {  // what it binds ends with it
        bind_team(count);
#pragma omp parallel num_threads(count)
        all[static_cast<std::size_t>(omp_get_thread_num())] = cores_of_this_thread();
    }}.join();
    return all;
}

TEST(InferenceThreads, ATeamIsPlacedWhereEachOfItsThreadsHasACoreAndThereAreSeveral) {
    using testing::ElementsAre;
    using testing::IsEmpty;
    const std::vector<int> eight{0, 1, 2, 3, 8, 9, 10, 11};
    EXPECT_THAT(team_places(1, {5}, 7), IsEmpty());
    EXPECT_THAT(team_places(2, {5}, 7), IsEmpty());
    EXPECT_THAT(team_places(2, {4, 5}, 6), ElementsAre(4, 5));
    EXPECT_THAT(team_places(2, {4, 5}, 7), ElementsAre(5, 4));
    EXPECT_THAT(team_places(8, eight, 21), ElementsAre(9, 10, 11, 0, 1, 2, 3, 8));
    EXPECT_THAT(team_places(2, eight, 21), IsEmpty());
    EXPECT_THAT(team_places(2, {}, 7), IsEmpty()) << "the kernel did not say";
}

TEST(InferenceThreads, ATeamOfAllCoresHasOneForEachThread) {
    const int cores = allowed_cores();
    if (cores == 1) GTEST_SKIP() << "one core";
    Cores used;
    for (const Cores& own : bound(cores)) {
        EXPECT_EQ(own.size(), 1U);
        used.insert(own.begin(), own.end());
    }
    EXPECT_EQ(used, cores_of_this_thread());
}

TEST(InferenceThreads, AnotherTeamIsPlacedByTheKernel) {
    for (const Cores& own : bound(allowed_cores() + 1)) EXPECT_EQ(own, cores_of_this_thread());
}

TEST(InferenceThreads, CoresAreThoseBeforeAnyThreadWasBound) {
    const int before = allowed_cores();
    std::jthread{[&] {
        bind_team(before);
        EXPECT_EQ(allowed_cores(), before);
    }}.join();
}

}  // namespace
}  // namespace bulkhead::worker

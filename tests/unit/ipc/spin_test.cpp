#include "ipc/ring/spin.h"

#include <sched.h>

#include <thread>

#include <gtest/gtest.h>

namespace bulkhead {
namespace {

using namespace std::chrono_literals;

/// As a thread is told that may use so many of this machine's CPUs; fewer where it has fewer.
std::chrono::microseconds allowed_on(int cpus, SpinSide side) {
    std::chrono::microseconds allowed{};
    std::thread{[&] {
        cpu_set_t mask;
        ASSERT_EQ(::sched_getaffinity(0, sizeof mask, &mask), 0);
        for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu)
            if (CPU_ISSET(cpu, &mask) && --cpus < 0) CPU_CLR(cpu, &mask);
        ASSERT_EQ(::sched_setaffinity(0, sizeof mask, &mask), 0);
        allowed = spin_allowed(50us, side);
    }}.join();
    return allowed;
}

TEST(Spin, NobodySpinsOnOneCpu) {
    EXPECT_EQ(allowed_on(1, SpinSide::client), 0us);
    EXPECT_EQ(allowed_on(1, SpinSide::worker), 0us);
}

TEST(Spin, OnTwoOnlyTheClientDoes) {
    if (std::thread::hardware_concurrency() < 2) GTEST_SKIP() << "one CPU";
    EXPECT_EQ(allowed_on(2, SpinSide::client), 50us);
    EXPECT_EQ(allowed_on(2, SpinSide::worker), 0us);
}

TEST(Spin, OnThreeBothDo) {
    if (std::thread::hardware_concurrency() < 3) GTEST_SKIP() << "fewer than three CPUs";
    EXPECT_EQ(allowed_on(3, SpinSide::client), 50us);
    EXPECT_EQ(allowed_on(3, SpinSide::worker), 50us);
}

}  // namespace
}  // namespace bulkhead

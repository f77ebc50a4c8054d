#include "ipc/base/own_cgroup.h"

#include <gtest/gtest.h>

namespace bulkhead {
namespace {

TEST(OwnCgroup, LiesBelowTheMountOfItsHierarchy) {
    constexpr auto unified = "25 1 0:22 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n";
    constexpr auto container = "25 1 0:22 /docker/c1 /sys/fs/cgroup ro - cgroup2 cgroup rw\n";
    constexpr auto hybrid = "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory\n"
                            "36 31 0:33 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
                            "41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n";
    constexpr auto of_hybrid = "9:name=systemd:/s\n4:memory:/jobs/a:b\n1:cpu,cpuacct:/c\n0::/u\n";
    const struct {
        const char* mounts;
        const char* cgroup;
        const char* controller;
        const char* expected;  ///< null: there is none
    } table[] = {
        {unified, "0::/user.slice/a.scope\n", "", "/sys/fs/cgroup/user.slice/a.scope"},
        {unified, "0::/\n", "", "/sys/fs/cgroup"},
        {unified, "", "", nullptr},
        {container, "0::/docker/c1/app\n", "", "/sys/fs/cgroup/app"},
        {container, "0::/docker/c1\n", "", "/sys/fs/cgroup"},
        {container, "0::/docker/c10\n", "", nullptr},
        {"", "0::/\n", "", nullptr},
        {"cut off - cgroup2 x", "0::/\n", "", nullptr},
        {"25 1 0:22 / /mnt/my\\040groups rw - cgroup2 cgroup2 rw\n", "0::/a\n", "", "/mnt/my groups/a"},
        {hybrid, of_hybrid, "", "/sys/fs/cgroup/unified/u"},
        {hybrid, of_hybrid, "memory", "/sys/fs/cgroup/memory/jobs/a:b"},
        {hybrid, of_hybrid, "cpuacct", "/sys/fs/cgroup/cpu,cpuacct/c"},
        {hybrid, of_hybrid, "pids", nullptr},
        {hybrid, "0::/u\n", "memory", nullptr},
        {"30 25 0:26 / /sys/fs/cgroup rw - cgroup cgroup rw,cpu\n", "5:cpu:/x\n", "", nullptr},
    };
    for (const auto& [mounts, cgroup, controller, expected] : table)
        EXPECT_EQ(own_cgroup(mounts, cgroup, controller).value_or("none"), expected ? expected : "none")
            << mounts << cgroup << controller;
}

}  // namespace
}  // namespace bulkhead

#include "ipc/base/own_cgroup.h"

#include <gtest/gtest.h>

namespace bulkhead {
namespace {

using Path = std::filesystem::path;

TEST(OwnCgroup, OfAUnifiedSystemLiesBelowItsMount) {
    EXPECT_EQ(own_cgroup("25 1 0:22 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n", "0::/user.slice/a.scope\n"),
              Path{"/sys/fs/cgroup/user.slice/a.scope"});
    EXPECT_EQ(own_cgroup("25 1 0:22 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n", "0::/\n"), Path{"/sys/fs/cgroup"});
}

TEST(OwnCgroup, OfAHybridSystemIsTheUnifiedPart) {
    EXPECT_EQ(own_cgroup("30 25 0:26 / /sys/fs/cgroup/cpu rw shared:9 - cgroup cgroup rw,cpu\n"
                         "31 25 0:27 / /sys/fs/cgroup/unified rw shared:10 - cgroup2 cgroup2 rw\n",
                         "5:cpu:/elsewhere\n0::/box\n"),
              Path{"/sys/fs/cgroup/unified/box"});
}

TEST(OwnCgroup, OfAContainerIsTakenRelativeToWhatIsMounted) {
    constexpr auto mount = "25 1 0:22 /docker/c1 /sys/fs/cgroup ro - cgroup2 cgroup rw\n";
    EXPECT_EQ(own_cgroup(mount, "0::/docker/c1/app\n"), Path{"/sys/fs/cgroup/app"});
    EXPECT_EQ(own_cgroup(mount, "0::/docker/c1\n"), Path{"/sys/fs/cgroup"});
    EXPECT_EQ(own_cgroup(mount, "0::/docker/c10\n"), std::nullopt);
}

TEST(OwnCgroup, IsAbsentWhereThereIsNone) {
    EXPECT_EQ(own_cgroup("", "0::/\n"), std::nullopt);
    EXPECT_EQ(own_cgroup("30 25 0:26 / /sys/fs/cgroup rw - cgroup cgroup rw,cpu\n", "5:cpu:/x\n"), std::nullopt);
    EXPECT_EQ(own_cgroup("25 1 0:22 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n", ""), std::nullopt);
    EXPECT_EQ(own_cgroup("cut off - cgroup2 x", "0::/\n"), std::nullopt);
}

TEST(OwnCgroup, UnescapesTheMountPoint) {
    EXPECT_EQ(own_cgroup("25 1 0:22 / /mnt/my\\040groups rw - cgroup2 cgroup2 rw\n", "0::/a\n"),
              Path{"/mnt/my groups/a"});
}

constexpr auto hybrid_mounts = "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory\n"
                               "36 31 0:33 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
                               "41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n";

TEST(OwnCgroup, OfAControllerOfVersionOneIsTheFolderInItsOwnHierarchy) {
    constexpr auto cgroup = "9:name=systemd:/s\n4:memory:/jobs/a:b\n1:cpu,cpuacct:/c\n0::/u\n";
    EXPECT_EQ(own_cgroup(hybrid_mounts, cgroup, "memory"), Path{"/sys/fs/cgroup/memory/jobs/a:b"});
    EXPECT_EQ(own_cgroup(hybrid_mounts, cgroup, "cpuacct"), Path{"/sys/fs/cgroup/cpu,cpuacct/c"});
    EXPECT_EQ(own_cgroup(hybrid_mounts, cgroup), Path{"/sys/fs/cgroup/unified/u"});
    EXPECT_EQ(own_cgroup(hybrid_mounts, cgroup, "pids"), std::nullopt);
    EXPECT_EQ(own_cgroup(hybrid_mounts, "0::/u\n", "memory"), std::nullopt);
    EXPECT_EQ(own_cgroup("35 31 0:32 /docker/c1 /sys/fs/cgroup/memory ro - cgroup cgroup ro,memory\n",
                         "4:memory:/docker/c1\n", "memory"),
              Path{"/sys/fs/cgroup/memory"});
}

}  // namespace
}  // namespace bulkhead

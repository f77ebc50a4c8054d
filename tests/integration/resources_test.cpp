// When the machine itself says no: read-only folders, full disks, no descriptor left.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mount.h>

#include "tests/support/daemon/daemon.h"
#include "tests/support/daemon/fleets.h"

namespace bulkhead::test {
namespace {

namespace json = boost::json;
using ::testing::HasSubstr;

/// A small tmpfs on `folder`, or nothing where this user may not mount.
class SmallDisk {
public:
    SmallDisk(const std::filesystem::path& folder, const char* options) : folder_{folder} {
        std::filesystem::create_directories(folder);
        mounted_ = ::mount("tmpfs", folder.c_str(), "tmpfs", 0, options) == 0;
    }
    ~SmallDisk() {
        if (mounted_) ::umount2(folder_.c_str(), MNT_DETACH);
    }
    SmallDisk(const SmallDisk&) = delete;
    SmallDisk& operator=(const SmallDisk&) = delete;
    [[nodiscard]] bool mounted() const noexcept { return mounted_; }

private:
    std::filesystem::path folder_;
    bool mounted_ = false;
};

TEST(Resources, AFullDiskUnderThePackageCacheIsALoadError) {
    TemporaryFolder folder;
    SmallDisk disk{folder.path() / "cache", "mode=0700,size=256k"};
    if (!disk.mounted()) GTEST_SKIP() << "this user may not mount a file system";
    SpawnOptions options;
    options.environment["XDG_CACHE_HOME"] = folder.path() / "cache";
    Daemon daemon{fleet({minilm("restart: never"), test_model("echo", "echo.pt")}), options};

    const auto loaded = daemon.load("minilm");

    ASSERT_FALSE(loaded);
    EXPECT_EQ(loaded.error().code, ErrorCode::resources_exhausted) << loaded.error().text();
    EXPECT_THAT(loaded.error().text(), HasSubstr("No space left"));
    EXPECT_TRUE(daemon.load("echo"));
}

TEST(Resources, RunningOutOfDescriptorsFailsTheNewChannelAlone) {
    SpawnOptions options;
    options.open_files_max = 48;
    Daemon daemon{fleet({test_model("echo", "echo.pt", "channel: {count: 1024}")}), options};
    ASSERT_TRUE(daemon.load("echo")) << daemon.why("echo");
    auto first = daemon.open("echo").value();

    std::vector<Channel> held;
    Result<Channel> refused{Error{}};
    for (int i = 0; i < 64; ++i) {
        auto next = daemon.open("echo");
        if (!next) {
            refused = std::move(next);
            break;
        }
        held.push_back(std::move(*next));
    }

    ASSERT_FALSE(refused);
    EXPECT_EQ(refused.error().code, ErrorCode::resources_exhausted) << refused.error().text();
    EXPECT_TRUE(infer_float(first, "x", four, dims_four));
    held.clear();
    EXPECT_TRUE(daemon.wait_until("echo", [](const json::object& row) { return row.at("channels").as_int64() == 1; }));
    EXPECT_TRUE(daemon.open("echo"));
}

TEST(Resources, ADaemonThatCannotOpenWhatItNeedsSaysSo) {
    TemporaryFolder folder;
    const auto file = folder.write("fleet.yaml", fleet({test_model("echo", "echo.pt")}));
    const auto finished = run({"bash", "-c", "ulimit -n 6; exec \"$@\"", "limit", program("bulkheadd"), "--socket",
                               folder.path() / "run/control.sock", file});

    EXPECT_NE(finished.exit_code, 0);
    EXPECT_FALSE(finished.err.empty());
}

}  // namespace
}  // namespace bulkhead::test

#include "worker/generation/models/fit.h"

#include <limits>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "tests/unit/worker/model_fixture.h"

namespace bulkhead::worker::generation {
namespace {

constexpr std::uint64_t unlimited = std::numeric_limits<std::uint64_t>::max();
constexpr std::uint64_t mib = 1 << 20;

/// Folders with the files of a hybrid system: version 2 in "unified", version 1's
/// memory in "memory".
class CgroupRoom : public testing::Test {
protected:
    void limit_v2(const std::string& folder, const std::string& limit, std::uint64_t used, std::uint64_t cache = 0) {
        write("unified" + folder, "memory.max", limit);
        write("unified" + folder, "memory.current", std::to_string(used));
        write("unified" + folder, "memory.stat",
              fmt::format("anon {}\nactive_file {}\ninactive_file {}\n", used - cache, cache / 4, cache - cache / 4));
    }
    void limit_v1(const std::string& folder, std::uint64_t limit, std::uint64_t used, std::uint64_t cache = 0) {
        write("memory" + folder, "memory.limit_in_bytes", std::to_string(limit));
        write("memory" + folder, "memory.usage_in_bytes", std::to_string(used));
        write("memory" + folder, "memory.stat",
              fmt::format("active_file 0\ninactive_file 0\ntotal_active_file {}\ntotal_inactive_file {}\n", cache / 4,
                          cache - cache / 4));
    }
    std::uint64_t room(std::string_view cgroup) const {
        const std::string top = root_.path().string();
        return cgroup_room(fmt::format("30 1 0:26 / {0}/cpu rw - cgroup cgroup rw,cpu\n"
                                       "31 1 0:27 / {0}/memory rw shared:9 - cgroup cgroup rw,memory\n"
                                       "32 1 0:28 / {0}/unified rw - cgroup2 cgroup2 rw\n",
                                       top),
                           cgroup);
    }

private:
    void write(const std::string& folder, const char* name, const std::string& text) const {
        std::filesystem::create_directories(root_.path() / folder);
        worker::test::write_file(root_.path() / folder / name, text + "\n");
    }
    worker::test::TemporaryFolder root_;
};

TEST_F(CgroupRoom, IsWhatItsOwnLimitLeaves) {
    limit_v2("/app.service", std::to_string(200 * mib), 50 * mib);
    EXPECT_EQ(room("0::/app.service\n"), 150 * mib);
    EXPECT_EQ(room("0::/other.service\n"), unlimited);
    limit_v1("/job", 300 * mib, 50 * mib);
    EXPECT_EQ(room("4:memory:/job\n"), 250 * mib);
}

TEST_F(CgroupRoom, IsThatOfTheTightestOnTheWayUp) {
    limit_v2("", "max", 900 * mib);
    limit_v2("/slice", std::to_string(500 * mib), 400 * mib);
    limit_v2("/slice/unit", "max", 50 * mib);
    limit_v2("/slice/unit/worker", std::to_string(200 * mib), 50 * mib);
    EXPECT_EQ(room("0::/slice/unit/worker\n"), 100 * mib);
    EXPECT_EQ(room("0::/slice/unit/unlisted/worker\n"), 100 * mib) << "a folder may have no memory controller";
    EXPECT_EQ(room("0::/\n"), unlimited);
    limit_v1("", 1'000 * mib, 930 * mib);
    limit_v1("/box", 800 * mib, 20 * mib);
    EXPECT_EQ(room("4:memory:/box\n"), 70 * mib);
}

TEST_F(CgroupRoom, OfBothHierarchiesTheTighterCounts) {
    limit_v2("/a", std::to_string(200 * mib), 0);
    limit_v1("/b", 100 * mib, 0);
    EXPECT_EQ(room("4:memory:/b\n0::/a\n"), 100 * mib);
    limit_v1("/b", 0x7ffffffffffff000, 0);  // what version 1 says where nobody set one
    EXPECT_EQ(room("4:memory:/b\n0::/a\n"), 200 * mib);
}

/// Weights that are mapped lie there, and a load of gigabytes must not be refused for having
/// been read once.
TEST_F(CgroupRoom, CountsNoPageCacheAsUsed) {
    limit_v2("/a", std::to_string(200 * mib), 190 * mib, 180 * mib);
    EXPECT_EQ(room("0::/a\n"), 190 * mib);
    limit_v1("/b", 200 * mib, 190 * mib, 100 * mib);
    EXPECT_EQ(room("4:memory:/b\n"), 110 * mib);
    limit_v2("/full", std::to_string(100 * mib), 130 * mib);
    EXPECT_EQ(room("0::/full\n"), 0U);
}

}  // namespace
}  // namespace bulkhead::worker::generation

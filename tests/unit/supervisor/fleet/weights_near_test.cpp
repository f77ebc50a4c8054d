#include "supervisor/fleet/weights_near.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>

#include "ipc/base/unique_fd.h"
#include "tests/support/temporary_folder.h"
#include "tests/unit/supervisor/loop.h"

namespace bulkhead::supervisor {
namespace {

constexpr std::uint64_t file_bytes = 20 << 20;

class WeightsNearTest : public testing::Test {
protected:
    /// A model whose file was written to the disk, and is not in the page cache.
    void add(const std::string& name) {
        config::ModelSpec model;
        model.name = name;
        model.file = folder_.path() / name;
        std::ofstream{model.file, std::ios::binary} << std::string(file_bytes, 'w');
        evict(model.file);
        fleet_.models.push_back(model);
        candidates_.push_back({name, 0, true, false, 0});
    }
    static void evict(const std::filesystem::path& file) {
        const UniqueFd fd{::open(file.c_str(), O_RDONLY | O_CLOEXEC)};
        ::fsync(fd.get());
        ::posix_fadvise(fd.get(), 0, 0, POSIX_FADV_DONTNEED);
    }
    std::uint64_t cached(const std::string& name) const { return read_ahead({folder_.path() / name}, 0).cached; }
    bool comes(const std::function<bool()>& condition) { return test::run_until(io_, condition); }

    bulkhead::test::TemporaryFolder folder_;
    boost::asio::io_context io_;
    config::Fleet fleet_;
    std::vector<NearCandidate> candidates_;
};

TEST_F(WeightsNearTest, ReadsWhatTheKernelEvictedWithinTheBound) {
    add("first");
    add("second");
    fleet_.models.emplace_back().name = "gone";
    fleet_.models.back().file = folder_.path() / "gone";
    candidates_.push_back({"gone", 0, true, false, 0});
    if (cached("first") > 0) GTEST_SKIP() << "this file system keeps its files in memory";
    fleet_.near_bytes = file_bytes + file_bytes / 2;
    WeightsNear near{io_, fleet_, folder_.path(), [this] { return candidates_; }};
    EXPECT_FALSE(near.is_near("first")) << "not known yet";

    near.look();
    ASSERT_TRUE(comes([&] { return cached("first") == file_bytes; }));
    EXPECT_EQ(near.is_near("first"), false) << "when it was looked at";
    near.look();
    ASSERT_TRUE(comes([&] { return near.is_near("first").value_or(false); }));
    EXPECT_EQ(near.is_near("second"), false);
    EXPECT_FALSE(near.is_near("gone")) << "it has no files";
    EXPECT_EQ(cached("second"), 0U) << "there is room for one";

    evict(folder_.path() / "first");
    near.look();
    EXPECT_TRUE(comes([&] { return cached("first") == file_bytes; }));
}

}  // namespace
}  // namespace bulkhead::supervisor

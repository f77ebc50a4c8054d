#include "worker/model/read_ahead.h"

#include <fcntl.h>
#include <sys/mman.h>

#include <gtest/gtest.h>

#include "ipc/base/unique_fd.h"
#include "tests/unit/worker/model_fixture.h"

namespace bulkhead::worker {
namespace {

class ReadAhead : public testing::Test {
protected:
    test::TemporaryFolder folder;
    std::vector<std::pair<std::uint64_t, std::uint64_t>> reports;

    std::filesystem::path write(const std::string& name, std::size_t bytes) {
        const auto path = folder.path() / name;
        std::filesystem::create_directories(path.parent_path());
        test::write_file(path, std::string(bytes, 'w'));
        return path;
    }
    void read() {
        reports.clear();
        read_ahead(folder.path(),
                   [this](std::uint64_t done, std::uint64_t total) { reports.emplace_back(done, total); });
    }
    /// Puts a file out of memory, as far as its file system does that when asked.
    static void forget(const std::filesystem::path& path) {
        const UniqueFd file{::open(path.c_str(), O_RDWR | O_CLOEXEC)};
        ::fsync(file.get());
        ::posix_fadvise(file.get(), 0, 0, POSIX_FADV_DONTNEED);
    }
    static std::size_t pages_in_memory(const std::filesystem::path& path) {
        const UniqueFd file{::open(path.c_str(), O_RDONLY | O_CLOEXEC)};
        const auto bytes = std::filesystem::file_size(path);
        void* const memory = ::mmap(nullptr, bytes, PROT_READ, MAP_SHARED, file.get(), 0);
        std::vector<unsigned char> resident((bytes + 4095) / 4096);
        EXPECT_EQ(::mincore(memory, bytes, resident.data()), 0);
        ::munmap(memory, bytes);
        return static_cast<std::size_t>(std::ranges::count_if(resident, [](auto state) { return (state & 1) != 0; }));
    }
};

TEST_F(ReadAhead, BringsEveryFileIntoMemoryAndTellsHowFarItIs) {
    constexpr std::size_t mebibyte = 1 << 20;
    const auto weights = write("model/weights.bin", 5 * mebibyte + 1);
    write("model/kernels/code.so", 2 * mebibyte);
    forget(weights);
    const auto before = pages_in_memory(weights);

    read();

    EXPECT_EQ(pages_in_memory(weights), 5 * 256 + 1U) << before << " before";
    ASSERT_EQ(reports.size(), 9U) << "one at the start, then one a chunk";
    EXPECT_EQ(reports.front().first, 0U);
    for (std::size_t i = 1; i < reports.size(); ++i) {
        EXPECT_GT(reports[i].first, reports[i - 1].first);
        EXPECT_EQ(reports[i].second, 7 * mebibyte + 1);
    }
    EXPECT_EQ(reports.back().first, reports.back().second);
    const auto cold = reports;

    read();  // all is in memory

    EXPECT_EQ(reports, cold);
}

TEST_F(ReadAhead, LeavesWhatCannotBeReadToItsLoader) {
    std::filesystem::create_symlink("/nonexistent", folder.path() / "dangling");
    write("empty", 0);
    write("weights.bin", 10);

    read();

    EXPECT_EQ(reports.back(), (std::pair<std::uint64_t, std::uint64_t>{10, 10}));
}

}  // namespace
}  // namespace bulkhead::worker

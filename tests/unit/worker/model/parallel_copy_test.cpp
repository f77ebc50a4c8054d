#include "worker/model/parallel_copy.h"

#include <random>

#include <gtest/gtest.h>

namespace bulkhead::worker {
namespace {

TEST(ParallelCopy, CopiesEveryByteAndNoneBeside) {
    constexpr std::size_t most = 5 << 20;
    constexpr std::byte untouched{0xa5};
    std::vector<std::byte> from(most + 64);
    std::mt19937_64 random{1};
    for (std::byte& byte : from) byte = static_cast<std::byte>(random());
    for (const std::ptrdiff_t threads : {1, 2, 3, 8}) {
        ParallelCopy copy{threads};
        for (const std::size_t size : {std::size_t{0}, std::size_t{1}, std::size_t{4097}, (std::size_t{256} << 10) - 1,
                                       std::size_t{256} << 10, (std::size_t{4} << 20) + 13, most}) {
            for (const std::size_t offset : {0, 3}) {  // other bytes each time
                std::vector<std::byte> to(size + 64, untouched);
                copy(to.data() + 32, std::span{from}.subspan(offset * 7, size));
                ASSERT_TRUE(std::equal(to.begin() + 32, to.end() - 32, from.begin() + static_cast<int>(offset) * 7))
                    << size << " bytes by " << threads;
                ASSERT_TRUE(std::all_of(to.begin(), to.begin() + 32, [](std::byte b) { return b == untouched; }));
                ASSERT_TRUE(std::all_of(to.end() - 32, to.end(), [](std::byte b) { return b == untouched; }));
            }
        }
    }
}

}  // namespace
}  // namespace bulkhead::worker

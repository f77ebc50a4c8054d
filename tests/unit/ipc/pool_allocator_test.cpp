#include "ipc/base/pool_allocator.h"

#include <map>
#include <string>
#include <thread>

#include <gtest/gtest.h>

#include "ipc/base/fixed_text.h"

namespace bulkhead {
namespace {

using Table = std::map<int, std::string, std::less<>, PoolAllocator<std::pair<const int, std::string>>>;

TEST(PoolAllocator, GivesABlockThatCameBackBeforeItAsksTheHeap) {
    BlockPool pool;
    void* const first = pool.allocate(48);
    void* const second = pool.allocate(48);

    pool.release(first, 48);
    pool.release(second, 48);

    EXPECT_EQ(pool.allocate(48), second);
    EXPECT_EQ(pool.allocate(48), first);
    pool.release(first, 48);
    pool.release(second, 48);
}

TEST(PoolAllocator, NeverGivesABlockOfAnotherSize) {
    BlockPool pool;
    void* const small = pool.allocate(16);
    pool.release(small, 16);

    void* const large = pool.allocate(4096);

    EXPECT_NE(large, small);
    std::fill_n(static_cast<char*>(large), 4096, 'x');  // what a sanitizer would object to
    pool.release(large, 4096);
    EXPECT_EQ(pool.allocate(16), small);
    pool.release(small, 16);
}

TEST(PoolAllocator, ABlockOutlivesTheAllocatorItCameFrom) {
    std::shared_ptr<std::string> text;
    {
        const PoolAllocator<std::string> allocator;
        text = std::allocate_shared<std::string>(allocator, 100, 'x');
    }
    EXPECT_EQ(text->size(), 100u);
}

TEST(PoolAllocator, AContainerThatWasMovedFromIsUsedAgain) {
    Table from{{1, "one"}, {2, "two"}};
    Table to = std::move(from);
    from.clear();
    from.emplace(3, "three");
    to = std::move(from);

    EXPECT_EQ(to, (Table{{3, "three"}}));
}

TEST(PoolAllocator, ServesSeveralThreads) {
    const PoolAllocator<std::string> allocator;
    const auto churn = [&] {
        for (int i = 0; i < 10'000; ++i) EXPECT_EQ(std::allocate_shared<std::string>(allocator, 3, 'x')->size(), 3u);
    };
    std::thread other{churn};
    churn();
    other.join();
}

TEST(FixedText, KeepsWhatFitsItsFieldAndTellsWhatDoesNot) {
    const FixedText<4> fits{"abc"}, empty{}, cut{"abcdef"};

    EXPECT_EQ(fits, "abc");
    EXPECT_TRUE(fits.fits());
    EXPECT_TRUE(empty.empty());
    EXPECT_FALSE(cut.fits()) << "its terminator would not";
    EXPECT_EQ(cut.view(), "abc");
    EXPECT_EQ(cut.size(), 6u);
    EXPECT_FALSE(cut == fits);
}

}  // namespace
}  // namespace bulkhead

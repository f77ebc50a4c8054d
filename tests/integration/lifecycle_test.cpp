// What a daemon leaves behind.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <set>

#include "tests/integration/fixture/daemon.h"
#include "tests/integration/fixture/fleets.h"

namespace bulkhead::test {
namespace {

TEST(Lifecycle, LeavesNoNameInSharedMemoryOrTmp) {
    // Others may write there meanwhile: in /tmp only what LibTorch's own loader would leave
    // counts, /tmp/XXXXXX.
    const auto names = [] {
        std::set<std::string> found;
        for (const auto& entry : std::filesystem::directory_iterator{"/dev/shm"}) found.insert(entry.path());
        for (const auto& entry : std::filesystem::directory_iterator{"/tmp"}) {
            const std::string name = entry.path().filename();
            if (name.size() == 6 && std::ranges::all_of(name, [](unsigned char c) { return std::isalnum(c) != 0; }))
                found.insert(entry.path());
        }
        return found;
    };
    const auto before = names();
    Daemon daemon{fleet({minilm()})};
    ASSERT_TRUE(daemon.load("minilm")) << daemon.why("minilm");

    const auto loaded = names();

    EXPECT_EQ(before, loaded);
}

}  // namespace
}  // namespace bulkhead::test

#include "worker/link/identity.h"

#include <gtest/gtest.h>

namespace bulkhead::worker {
namespace {

TEST(Identity, IsReadFromTheEnvironmentsText) {
    const Result<Identity> identity = Identity::parse("abc:silero-vad/3#12");

    ASSERT_TRUE(identity);
    EXPECT_EQ(*identity, (Identity{"abc", "silero-vad", 3, 12}));
}

TEST(Identity, IsRefusedWhenAnyPartIsMissing) {
    for (const char* text : {"", "abc", "abc:m", "abc:m/1", "abc:m#1", "m/1#2", "abc:/1#2", "abc:m/x#2", "abc:m/1#",
                             "abc:m/1#2x", "abc:m/-1#2", "abc:m/1#99999999999999999999"})
        EXPECT_FALSE(Identity::parse(text)) << text;
}

}  // namespace
}  // namespace bulkhead::worker

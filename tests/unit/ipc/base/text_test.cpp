#include "ipc/base/text.h"

#include <gtest/gtest.h>

#include "ipc/base/error.h"

namespace bulkhead {
namespace {

TEST(Text, NamesAreUtf8WithoutControlCharacters) {
    for (const char* good : {"", "input_ids", "größe", "模型", "🙂"}) EXPECT_TRUE(is_printable(good)) << good;
    for (const char* bad : {"a\nb", "\x1b[31m", "\x7f",
                            "\xc2\x9b"
                            "31m",
                            "\xff", "\xc0\xaf", "\xed\xa0\x80", "\xf4\x90\x80\x80", "\xe2\x82", "\xc3", "\u2028",
                            "\u202Etxt", "a\u2066b"})
        EXPECT_FALSE(is_printable(bad)) << bad;
    EXPECT_FALSE(is_printable(std::string_view{"a\0b", 3}));
}

TEST(Text, FreeTextKeepsItsLinesLosesWhatATerminalWouldObeyAndIsCutBetweenCharacters) {
    EXPECT_EQ(made_printable("line\n\tünder \x1b[2J\xff", 100), "line\n\tünder ?[2J?");
    EXPECT_EQ(made_printable("a\u202Eb\u2027c", 100), "a?b\u2027c");
    EXPECT_EQ(made_printable("aü", 2), "a");
    EXPECT_EQ(made_printable("aü", 3), "aü");
    EXPECT_EQ(made_printable("abc", 0), "");
}

TEST(Sizes, HaveOneDigitAfterThePointAndABinaryUnit) {
    EXPECT_EQ(bytes_text(0), "0 bytes");
    EXPECT_EQ(bytes_text(1023), "1023 bytes");
    EXPECT_EQ(bytes_text(1024), "1.0 KiB");
    EXPECT_EQ(bytes_text(1288490189), "1.2 GiB");
    EXPECT_EQ(bytes_text((1u << 20) - 1), "1.0 MiB");
    EXPECT_EQ(bytes_text(std::uint64_t{3} << 50), "3072.0 TiB");
}

TEST(ErrorIn, IsTheLastErrorAmongOtherLines) {
    EXPECT_EQ(error_in("info: x\nerror: not_permitted: first; no\nerror: load_failed: a: second; mend; it\nbye"),
              (Error{ErrorCode::load_failed, "a: second; mend", "it"}));
    EXPECT_EQ(error_in("error: whatever: it says"), (Error{ErrorCode::internal, "whatever: it says", ""}));
    EXPECT_FALSE(error_in("errors there were none"));
}

}  // namespace
}  // namespace bulkhead

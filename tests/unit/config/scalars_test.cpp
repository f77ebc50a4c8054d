#include "config/scalars.h"

#include <cmath>

#include <gtest/gtest.h>

namespace bulkhead::config {
namespace {

using namespace std::chrono_literals;

TEST(Durations, NeedAUnitAndAWholeNumber) {
    EXPECT_EQ(parse_duration("250ms"), 250ms);
    EXPECT_EQ(parse_duration("30s"), 30s);
    EXPECT_EQ(parse_duration("2m"), 2min);
    EXPECT_EQ(parse_duration("24h"), 24h);
    for (const char* bad : {"", "s", "30", "1.5s", "-1s", "0s", "25h", "30 s", "30S", "99999999999999999999s"})
        EXPECT_FALSE(parse_duration(bad)) << bad;
}

TEST(Sizes, AreBytesOrBinaryUnits) {
    EXPECT_EQ(parse_size("4096"), 4096u);
    EXPECT_EQ(parse_size("64KiB"), 65536u);
    EXPECT_EQ(parse_size("4MiB"), 4u << 20);
    EXPECT_EQ(parse_size("2GiB"), 2ull << 30);
    for (const char* bad : {"", "KiB", "4MB", "4 MiB", "-1", "1.5MiB", "18446744073709551616", "17179869184GiB"})
        EXPECT_FALSE(parse_size(bad)) << bad;
}

TEST(Dimensions, AreANumberOrARange) {
    EXPECT_EQ(parse_dim("512"), (DimRange{512, 512}));
    EXPECT_EQ(parse_dim("0..256"), (DimRange{0, 256}));
    EXPECT_EQ(dim_text({1, 256}), "1..256");
    EXPECT_EQ(dim_text({7, 7}), "7");
    EXPECT_EQ(parse_dim("n=1..256"), (DimRange{1, 256, "n"}));
    EXPECT_EQ(parse_dim("_N2=7"), (DimRange{7, 7, "_N2"}));
    EXPECT_EQ(dim_text({1, 256, "n"}), "n=1..256");
    EXPECT_EQ(dim_text({7, 7, "n"}), "n=7");
    EXPECT_TRUE(parse_dim(std::string(32, 'n') + "=1..2"));
    EXPECT_FALSE(parse_dim(std::string(33, 'n') + "=1..2"));
    for (const char* bad : {"=1..2", "n=", "n", "2n=1..2", "n-m=1", "n=m=1", "n =1", "n= 1", "n=1..", "1..n=2"})
        EXPECT_FALSE(parse_dim(bad)) << bad;
    for (const char* bad : {"", "..", "1..", "..2", "1...2", "-1", "1..-2", "1.5", "a", "9999999999999999999"})
        EXPECT_FALSE(parse_dim(bad)) << bad;
}

TEST(Numbers, AreThoseOfYaml12) {
    EXPECT_EQ(parse_integer("-0017"), -17);
    EXPECT_EQ(parse_integer("0x1F"), 31);
    EXPECT_EQ(parse_integer("0o17"), 15);
    EXPECT_EQ(parse_integer("+5"), 5);
    EXPECT_EQ(parse_number("1e3"), 1000.0);
    EXPECT_EQ(parse_number("-.5"), -0.5);
    EXPECT_TRUE(std::isinf(*parse_number("-.inf")));
    EXPECT_TRUE(std::isnan(*parse_number(".nan")));
    for (const char* bad : {"", "+", "-", ".", "1_000", "0x", "1e", "inf", "nan", "--1", "+-1", "1,5"})
        EXPECT_FALSE(parse_number(bad)) << bad;
}

TEST(PlainText, IsWhatYaml12DoesNotTakeForSomethingElse) {
    for (const char* text : {"off", "yes", "on", "1..256", "1.2.3", "30s", "nil"}) EXPECT_TRUE(is_plain_text(text));
    for (const char* other : {"", "~", "null", "true", "FALSE", "12", "1.5", ".inf"})
        EXPECT_FALSE(is_plain_text(other)) << other;
}

TEST(Devices, AreNamedInFourWays) {
    for (const char* good : {"auto", "cpu", "cuda:0", "cuda:15", "GPU-0a1b2c3d-0a1b-0a1b-0a1b-0A1B2C3D4E5F"})
        EXPECT_TRUE(is_device(good)) << good;
    for (const char* bad : {"", "gpu", "cuda", "cuda:", "cuda:00", "cuda:100", "cuda:-1", "GPU-", "GPU-0a1b2c3d"})
        EXPECT_FALSE(is_device(bad)) << bad;
}

TEST(Names, HaveTheirBounds) {
    EXPECT_TRUE(is_model_name("7b.v1_x-y"));
    EXPECT_FALSE(is_model_name(".hidden"));
    EXPECT_FALSE(is_model_name("a/b"));
    EXPECT_TRUE(is_model_name(std::string(63, 'a')));
    EXPECT_FALSE(is_model_name(std::string(64, 'a')));
    EXPECT_TRUE(is_tensor_name(std::string(55, 'x')));
    EXPECT_FALSE(is_tensor_name(std::string(56, 'x')));
    EXPECT_FALSE(is_tensor_name("tab\t"));
    EXPECT_FALSE(is_method_name("1st"));
    EXPECT_TRUE(is_environment_name("_A1"));
    EXPECT_FALSE(is_environment_name("A-B"));
}

}  // namespace
}  // namespace bulkhead::config

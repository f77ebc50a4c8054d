#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "worker/package/package_metadata.h"

namespace bulkhead::worker {
namespace {

using testing::HasSubstr;

Machine machine() {
    return {.device = "cpu",
            .architecture = "x86_64",
            .cpu_flags = " fpu avx2 fma f16c avx512f avx512dq avx512vl avx512bw ",
            .compute_capability = "",
            .torch = "2.11.0"};
}

Error refusal(std::map<std::string, std::string> metadata, Machine here = machine()) {
    const auto checked = check_compatible({"a.so", ".", std::move(metadata)}, here);
    return checked ? Error{} : checked.error();
}

TEST(PackageMetadata, LetsAFittingPackagePass) {
    EXPECT_EQ(refusal({{"AOTI_DEVICE_KEY", "cpu"},
                       {"AOTI_PLATFORM", "linux"},
                       {"AOTI_MACHINE", "x86_64"},
                       {"AOTI_CPU_ISA", "AVX512"},
                       {"AOTI_COMPUTE_CAPABILITY", ""},
                       {"BULKHEAD_TORCH", "2.11.3+cu130"},
                       {"BULKHEAD_CPU_FLAGS", "avx2 fma"}}),
              Error{});
    EXPECT_EQ(refusal({}), Error{}) << "what is not told is not checked";
}

TEST(PackageMetadata, TellsWhetherInputsAreWrittenAndIsNotTrustedWhereItIsSilent) {
    const auto may_write = [](std::map<std::string, std::string> metadata) {
        return may_write_inputs({{}, {}, std::move(metadata)}, 2);
    };
    EXPECT_TRUE(may_write({}));
    EXPECT_TRUE(may_write({{"BULKHEAD_WRITTEN_ARGUMENTS", "none"}})) << "an older exporter's record, which is not true";
    EXPECT_FALSE(may_write({{"BULKHEAD_MUTATED_ARGUMENTS", "none"}}));
    EXPECT_FALSE(may_write({{"BULKHEAD_MUTATED_ARGUMENTS", "2 3"}})) << "its outputs, as arguments";
    EXPECT_TRUE(may_write({{"BULKHEAD_MUTATED_ARGUMENTS", "3 1"}}));
    EXPECT_TRUE(may_write({{"BULKHEAD_MUTATED_ARGUMENTS", "1x"}}));
    EXPECT_TRUE(may_write({{"BULKHEAD_MUTATED_ARGUMENTS", "-1"}}));
}

TEST(PackageMetadata, NamesBothSidesOfWhatDoesNotFit) {
    auto gpu = machine();
    gpu.device = "cuda";
    gpu.compute_capability = "89";
    const struct {
        std::map<std::string, std::string> metadata;
        const char* words;
        Machine here = machine();
    } all[] = {
        {{{"AOTI_DEVICE_KEY", "cuda"}}, "exported for \"cuda\", this worker's device is \"cpu\""},
        {{{"AOTI_CPU_ISA", "AVX512 AVX512_VNNI AMX_TILE"}},
         "its code uses amx_bf16, amx_int8, amx_tile, avx512_vnni, which this CPU lacks"},
        {{{"BULKHEAD_CPU_FLAGS", "avx2 bmi2"}}, "its code uses bmi2,"},
        {{{"AOTI_PLATFORM", "linux"}, {"AOTI_MACHINE", "aarch64"}}, "exported on linux aarch64, this is linux x86_64"},
        {{{"AOTI_DEVICE_KEY", "cuda"}, {"AOTI_COMPUTE_CAPABILITY", "90"}},
         "compute capability 90, this GPU has 89",
         gpu},
        {{{"BULKHEAD_TORCH", "2.1.0"}}, "torch 2.1.0, this worker has 2.11.0; export it again with torch 2.11"},
    };
    for (const auto& [metadata, words, here] : all) {
        const auto error = refusal(metadata, here);
        EXPECT_EQ(error.code, ErrorCode::package_incompatible);
        EXPECT_THAT(error.text(), HasSubstr(words));
    }
}

}  // namespace
}  // namespace bulkhead::worker

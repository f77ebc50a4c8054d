/// What the manifest of a package says of its memory, and how the first load is planned by it.

#include "supervisor/fleet/file_facts.h"
#include "tests/unit/supervisor/memory/policy_fixture.h"

namespace bulkhead::simulation {
namespace {

using supervisor::package_size, supervisor::PackageSize;

/// SmolLM2-135M's, less what nobody reads here.
constexpr const char* manifest = R"({"dtypes": {"weights": "float32", "kv": "float32"}, "rows": 1, "length": 2048,
    "slots": 4, "kv": {"layers": 30, "heads": 3, "dim": 64}, "weights": {"file": "w", "bytes": 538091952}})";

std::optional<PackageSize> size_of(const std::string& text, std::optional<std::uint32_t> slots = {},
                                   std::optional<std::uint32_t> length = {}) {
    return package_size(boost::json::parse(text), slots, length);
}

std::string with(std::string text, const std::string& from, const std::string& to) {
    return text.replace(text.find(from), from.size(), to);
}

TEST(MemoryPackage, SaysItsWeightsItsKvAndAWorkspace) {
    const auto size = size_of(manifest);
    ASSERT_TRUE(size);
    EXPECT_EQ(size->weights, 538'091'952U);
    EXPECT_EQ(size->kv, 2ULL * 30 * 3 * 64 * 4 * 2048 * 4);
    EXPECT_EQ(size->estimate().on_host, size->weights + size->kv + limits::workspace_of_host);
    EXPECT_EQ(size->estimate().on_gpu, size->weights + size->kv + limits::workspace_of_gpu);
    EXPECT_EQ(size_of(manifest, 1, 1024)->kv * 8, size->kv) << "as the fleet file declares it";
    EXPECT_EQ(size_of(with(manifest, R"("kv": "float32")", R"("kv": "bfloat16")"))->kv * 2, size->kv);
}

TEST(MemoryPackage, ThatSaysNothingOfUseIsMeasured) {
    for (const auto& [from, to] :
         std::vector<std::pair<std::string, std::string>>{{R"("slots": 4)", R"("slots": 0)"},
                                                          {R"("slots": 4)", R"("slots": -4)"},
                                                          {R"("slots": 4)", R"("slots": "4")"},
                                                          {R"("length": 2048)", R"("length": 1e30)"},
                                                          {"538091952", "1e30"},
                                                          {R"("kv": "float32")", R"("kv": "float5")"},
                                                          {R"("layers": 30, )", ""}})
        EXPECT_FALSE(size_of(with(manifest, from, to))) << to;
    std::string many = manifest;  // each figure is one that may be, their product is not
    for (const char* figure : {"2048", "30", "64"}) many = with(many, figure, "1000000");
    EXPECT_FALSE(size_of(many));
    for (const char* text : {"null", "[]", "{}", R"({"weights": 7, "kv": 7, "dtypes": 7})"})
        EXPECT_FALSE(size_of(text)) << text;
}

using MemoryPackagePlan = PolicyFixture;

TEST_F(MemoryPackagePlan, TheFirstLoadIsPlannedByThePackageTheSecondByMeasurement) {
    auto chat = model("chat", gib);
    chat.package = Estimate{3 * gib, gib};
    declare({chat});
    load("chat", 4 * gib);
    EXPECT_THAT(policy.why("chat", now), HasSubstr("it took 4.0 GiB, more than the 3.0 GiB that was estimated"));
    EXPECT_THAT(policy.why("chat", now), HasSubstr("a load takes 4.0 GiB (measured), 3.0 GiB were estimated"));
    send(event::Ending{{"chat", 0}});
    end("chat");
    ask("chat");
    EXPECT_EQ(all<action::Grant>().at(0).device_bytes, 4 * gib);
}

}  // namespace
}  // namespace bulkhead::simulation

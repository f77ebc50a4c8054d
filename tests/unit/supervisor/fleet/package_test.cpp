/// What the manifest of a package says of its memory, and how the first load is planned by it.

#include "supervisor/fleet/file_facts.h"
#include "supervisor/memory/limits.h"
#include "tests/unit/supervisor/memory/policy_fixture.h"

namespace bulkhead::simulation {
namespace {


/// SmolLM2-135M's, less what nobody reads here.
constexpr const char* manifest = R"({"dtypes": {"weights": "float32", "kv": "float32"}, "rows": 1, "length": 2048,
    "slots": 4, "kv": {"layers": 30, "heads": 3, "dim": 64}, "weights": {"file": "w", "bytes": 538091952}})";

/// Weights and KV.
std::optional<Bytes> size_of(const std::string& text, std::optional<std::uint32_t> slots = {},
                             std::optional<std::uint32_t> length = {}) {
    const auto estimate = supervisor::estimate_of(boost::json::parse(text), slots, length);
    if (!estimate) return std::nullopt;
    EXPECT_EQ(estimate->on_gpu - limits::workspace_of_gpu, estimate->on_host - limits::workspace_of_host);
    return estimate->on_host - limits::workspace_of_host;
}

std::string with(std::string text, const std::string& from, const std::string& to) {
    return text.replace(text.find(from), from.size(), to);
}

TEST(MemoryPackage, SaysItsWeightsItsKvAndAWorkspace) {
    constexpr Bytes weights = 538'091'952;
    constexpr Bytes kv = 2ULL * 30 * 3 * 64 * 4 * 2048 * 4;
    EXPECT_EQ(size_of(manifest), weights + kv);
    EXPECT_EQ(size_of(manifest, 1, 1024), weights + kv / 8) << "as the fleet file declares it";
    EXPECT_EQ(size_of(with(manifest, R"("kv": "float32")", R"("kv": "bfloat16")")), weights + kv / 2);
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
    declare({model("chat", gib, {.package = Estimate{3 * gib, gib}})});
    load("chat", 4 * gib);
    EXPECT_THAT(why("chat"), HasSubstr("it took 4.0 GiB, more than the 3.0 GiB that was estimated"));
    EXPECT_THAT(why("chat"), HasSubstr("a load takes 4.0 GiB (measured), 3.0 GiB were estimated"));
    send(event::Ending{{"chat", 0}});
    end("chat");
    ask("chat");
    EXPECT_EQ(only<action::Grant>().device_bytes, 4 * gib);
}

}  // namespace
}  // namespace bulkhead::simulation

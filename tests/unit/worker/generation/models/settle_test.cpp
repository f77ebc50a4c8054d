#include <gtest/gtest.h>

#include "worker/generation/models/manifest.h"

namespace bulkhead::worker::generation {
namespace {

/// 3 heads of 5 numbers of 16 bits: a position takes 30 bytes, so 8 positions are the first to end
/// at a multiple of 16.
Manifest crooked() {
    Manifest manifest;
    manifest.device = "cuda";
    manifest.kv_dtype = wire::DType::float16;
    manifest.heads = 3;
    manifest.dim = 5;
    manifest.length_max = 100;
    manifest.slots_max = 4;
    return manifest;
}

Error refusal(Manifest manifest, std::uint32_t slots, std::uint32_t length) {
    config::GenerateSpec chosen;
    chosen.slots = slots;
    chosen.length = length;
    const auto settled = settle(manifest, chosen);
    return settled ? Error{} : settled.error();
}

TEST(SlotAlignment, SlotsThatEndAtAMultipleOf16BytesPass) {
    EXPECT_EQ(refusal(crooked(), 4, 96), Error{});
    EXPECT_EQ(refusal(crooked(), 1, 99), Error{}) << "none follows the only one";
    Manifest usual = crooked();
    usual.heads = 2;
    usual.dim = 64;
    EXPECT_EQ(refusal(usual, 4, 99), Error{});
    Manifest on_cpu = crooked();
    on_cpu.device = "cpu";
    EXPECT_EQ(refusal(on_cpu, 4, 90), Error{}) << "there is no copy";
}

TEST(SlotAlignment, OthersAreRefusedWithWhatWouldFit) {
    const Error error = refusal(crooked(), 4, 90);

    EXPECT_EQ(error.code, ErrorCode::config_invalid);
    EXPECT_EQ(error.text(),
              "config_invalid: laying out KV: a layer's keys of a slot take 2700 bytes (90 positions of 30), and the "
              "next slot's must begin at a multiple of 16; what would fit: generate.length: 88, or generate.length: 96, or "
              "generate.slots: 1");
    const std::string ways = "what would fit: generate.length: ";
    EXPECT_EQ(refusal(crooked(), 4, 99).remedy, ways + "96, or generate.slots: 1") << "the package has no longer one";
    EXPECT_EQ(refusal(crooked(), 4, 7).remedy, ways + "8, or generate.slots: 1");
    Manifest guided = crooked();
    guided.shape.rows = 2;
    EXPECT_EQ(refusal(guided, 4, 92), Error{});
    EXPECT_EQ(refusal(guided, 4, 90).remedy, ways + "88, or generate.length: 92, or generate.slots: 1");
}

}  // namespace
}  // namespace bulkhead::worker::generation

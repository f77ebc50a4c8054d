#include "worker/generation/models/kv_memory.h"

#include <fstream>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace bulkhead::worker::generation {
namespace {

/// The kernel's word on the mapping that an address lies in.
std::string smaps_of(const void* address) {
    const auto wanted = reinterpret_cast<std::uintptr_t>(address);
    std::ifstream smaps{"/proc/self/smaps"};
    std::string block, line;
    bool inside = false;
    while (std::getline(smaps, line)) {
        unsigned long first = 0, end = 0;
        if (std::sscanf(line.c_str(), "%lx-%lx ", &first, &end) == 2) inside = first <= wanted && wanted < end;
        if (inside) block += line + "\n";
    }
    return block;
}

/// Two rows of two heads of 64 numbers a slot, 128 positions, in two layers.
KvMemory memory(std::uint32_t slots) {
    Manifest manifest;
    manifest.layers = 2;
    manifest.heads = 2;
    manifest.dim = 64;
    manifest.kv_dtype = wire::DType::float32;
    manifest.shape.rows = 2;
    manifest.shape.slots = slots;
    manifest.shape.length = 128;
    return KvMemory{manifest};
}

TEST(KvMemory, IsKeptOutOfCoreDumps) {
    const KvMemory kv = memory(2);
    for (const at::Tensor& buffer : kv.front(2)) {
        const std::string smaps = smaps_of(buffer.data_ptr());
        EXPECT_NE(smaps.find(" dd "), std::string::npos) << smaps;
    }
}

TEST(KvMemory, ALoneSlotStaysWhereItLiesAndSeveralAreGathered) {
    KvMemory kv = memory(4);
    constexpr std::int64_t used = 5;
    for (std::uint32_t slot = 0; slot < 4; ++slot)
        for (const at::Tensor& buffer : kv.of(slot)) buffer.narrow(2, 0, used).fill_(static_cast<double>(slot));
    const std::vector<std::uint32_t> written(4, used);
    // of each slot: the number that all of its rows, heads and layers were filled with
    const auto held = [&](const std::vector<at::Tensor>& buffers) {
        std::vector<float> all;
        for (std::int64_t row = 0; row < buffers.front().size(0); row += 2) {
            all.push_back(buffers.front()[row][0][0][0].item<float>());
            for (const at::Tensor& buffer : buffers)
                EXPECT_TRUE(buffer.narrow(0, row, 2).narrow(2, 0, used).eq(all.back()).all().item<bool>());
        }
        return all;
    };
    using testing::ElementsAre;

    kv.exchange(0, 2);
    const void* const address = kv.of(0).front().data_ptr();
    EXPECT_EQ(kv.gather(1, written), 0U);
    EXPECT_EQ(kv.front(1).front().data_ptr(), address);
    EXPECT_THAT(held(kv.front(1)), ElementsAre(2));

    kv.exchange(1, 0);
    EXPECT_EQ(kv.gather(3, written), 2U) << "2, 1, 0 lie as 1, 2, 0";
    EXPECT_THAT(held(kv.front(4)), ElementsAre(1, 2, 0, 3));
    EXPECT_THAT(held(kv.of(2)), ElementsAre(0));
    EXPECT_EQ(kv.gather(3, written), 0U);

    kv.exchange(1, 3);
    kv.copy(1, 0, used);
    kv.clear(3, 0, used);
    EXPECT_THAT(held(kv.of(0)), ElementsAre(3));
    EXPECT_THAT(held(kv.of(3)), ElementsAre(0));
    EXPECT_EQ(kv.gather(4, written), 1U);
    EXPECT_THAT(held(kv.front(4)), ElementsAre(3, 3, 0, 0));
}

}  // namespace
}  // namespace bulkhead::worker::generation

#include "worker/generation/models/kv_memory.h"

#include <fstream>
#include <string>

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

TEST(KvMemory, IsKeptOutOfCoreDumps) {
    Manifest manifest;
    manifest.layers = 2;
    manifest.heads = 2;
    manifest.rows = 1;
    manifest.dim = 64;
    manifest.kv_dtype = wire::DType::float32;
    Shape shape;
    shape.slots = 2;
    shape.length = 128;
    const KvMemory kv{manifest, shape};
    for (const at::Tensor& buffer : kv.front(2)) {
        const std::string smaps = smaps_of(buffer.data_ptr());
        EXPECT_NE(smaps.find(" dd "), std::string::npos) << smaps;
    }
}

}  // namespace
}  // namespace bulkhead::worker::generation

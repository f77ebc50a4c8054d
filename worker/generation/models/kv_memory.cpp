#include "worker/generation/models/kv_memory.h"

#include <algorithm>
#include <cstring>

#include <ATen/Functions.h>
#include <fmt/format.h>

#include "ipc/channel/dtype.h"
#include "worker/torch/runtime.h"

namespace bulkhead::worker::generation {

KvMemory::KvMemory(const Manifest& manifest, const Shape& shape)
    : position_bytes_{std::uint64_t{manifest.dim} * element_size(manifest.kv_dtype)},
      head_bytes_{position_bytes_ * shape.length}, slot_bytes_{head_bytes_ * manifest.heads * manifest.rows},
      buffer_bytes_{slot_bytes_ * shape.slots}, mapping_{buffer_bytes_ * 2 * manifest.layers, PROT_READ | PROT_WRITE,
                                                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE} {
    const std::uint64_t bytes = buffer_bytes_ * 2 * manifest.layers;
    if (!mapping_)
        throw ErrorException{{ErrorCode::out_of_memory, fmt::format("mapping {} MiB of KV", bytes >> 20),
                              "lower `generate.slots` or `generate.length`"}};
    std::byte* const address = mapping_.bytes().data();
    (void)::madvise(address, bytes, MADV_DONTDUMP);  // if refused, core files are
                                                     // larger and show more

    std::vector<at::Tensor> whole;
    const std::int64_t rows = manifest.rows;
    for (std::uint64_t offset = 0; offset < bytes; offset += buffer_bytes_)
        whole.push_back(at::from_blob(address + offset,
                                      {rows * shape.slots, manifest.heads, shape.length, manifest.dim},
                                      at::TensorOptions{}.dtype(scalar_type(manifest.kv_dtype))));
    front_.resize(shape.slots + 1);
    of_.resize(shape.slots);
    for (const at::Tensor& buffer : whole)
        for (std::uint32_t slot = 0; slot < shape.slots; ++slot) {
            front_[slot + 1].push_back(buffer.narrow(0, 0, rows * (slot + 1)));
            of_[slot].push_back(buffer.narrow(0, rows * slot, rows));
        }
}

template <typename F>
void KvMemory::each_head(std::uint32_t slot, std::uint32_t first, std::uint32_t end, const F& f) {
    if (first >= end) return;
    for (std::uint64_t buffer = slot * slot_bytes_; buffer < mapping_.bytes().size(); buffer += buffer_bytes_)
        for (std::uint64_t head = 0; head < slot_bytes_; head += head_bytes_)
            f(mapping_.bytes().subspan(buffer + head + first * position_bytes_, (end - first) * position_bytes_));
}

void KvMemory::exchange(std::uint32_t a, std::uint32_t b, std::uint32_t length) {
    const std::ptrdiff_t distance =
        (static_cast<std::ptrdiff_t>(b) - static_cast<std::ptrdiff_t>(a)) * static_cast<std::ptrdiff_t>(slot_bytes_);
    each_head(a, 0, length, [&](std::span<std::byte> bytes) {
        std::swap_ranges(bytes.begin(), bytes.end(), bytes.data() + distance);
    });
}

void KvMemory::copy(std::uint32_t from, std::uint32_t to, std::uint32_t length) {
    const std::ptrdiff_t distance = (static_cast<std::ptrdiff_t>(to) - static_cast<std::ptrdiff_t>(from)) *
                                    static_cast<std::ptrdiff_t>(slot_bytes_);
    each_head(from, 0, length,
              [&](std::span<std::byte> bytes) { std::memcpy(bytes.data() + distance, bytes.data(), bytes.size()); });
}

void KvMemory::clear(std::uint32_t slot, std::uint32_t first, std::uint32_t end) {
    each_head(slot, first, end, [](std::span<std::byte> bytes) { std::ranges::fill(bytes, std::byte{0}); });
}

}  // namespace bulkhead::worker::generation

#include "worker/generation/models/kv_memory.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include <ATen/ops/from_blob.h>
#include <fmt/format.h>

#include "ipc/channel/dtype.h"
#include "worker/torch/runtime.h"

namespace bulkhead::worker::generation {

KvMemory::KvMemory(const Manifest& manifest) {
    const Shape& shape = manifest.shape;
    position_bytes_ = std::uint64_t{manifest.dim} * element_size(manifest.kv_dtype);
    head_bytes_ = position_bytes_ * shape.length;
    slot_bytes_ = head_bytes_ * manifest.heads * shape.rows;
    buffer_bytes_ = slot_bytes_ * shape.slots;
    const std::uint64_t bytes = buffer_bytes_ * 2 * manifest.layers;
    mapping_ = {bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE};
    if (!mapping_)
        throw ErrorException{{ErrorCode::out_of_memory, fmt::format("mapping {} MiB of KV", bytes >> 20),
                              "lower `generate.slots` or `generate.length`"}};
    std::byte* const address = mapping_.bytes().data();
    (void)::madvise(address, bytes, MADV_DONTDUMP);  // if refused, core files are
                                                     // larger and show more

    const std::int64_t rows = shape.rows;
    front_.resize(shape.slots + 1);
    of_.resize(shape.slots);
    place_.resize(shape.slots);
    std::iota(place_.begin(), place_.end(), 0U);
    for (std::uint64_t offset = 0; offset < bytes; offset += buffer_bytes_) {
        const at::Tensor buffer =
            at::from_blob(address + offset, {rows * shape.slots, manifest.heads, shape.length, manifest.dim},
                          at::TensorOptions{}.dtype(scalar_type(manifest.kv_dtype)));
        for (std::uint32_t slot = 0; slot < shape.slots; ++slot) {
            front_[slot + 1].push_back(buffer.narrow(0, 0, rows * (slot + 1)));
            of_[slot].push_back(buffer.narrow(0, rows * slot, rows));
        }
    }
}

void KvMemory::each_head(std::uint32_t place, std::uint32_t first, std::uint32_t end, const auto& f) {
    if (first >= end) return;
    for (std::uint64_t buffer = place * slot_bytes_; buffer < mapping_.bytes().size(); buffer += buffer_bytes_)
        for (std::uint64_t head = 0; head < slot_bytes_; head += head_bytes_)
            f(mapping_.bytes().subspan(buffer + head + first * position_bytes_, (end - first) * position_bytes_));
}

std::ptrdiff_t KvMemory::distance(std::uint32_t from, std::uint32_t to) const {
    return (static_cast<std::ptrdiff_t>(to) - static_cast<std::ptrdiff_t>(from)) *
           static_cast<std::ptrdiff_t>(slot_bytes_);
}

std::uint32_t KvMemory::gather(std::uint32_t sequences, std::span<const std::uint32_t> written) {
    std::uint32_t swaps = 0;
    for (std::uint32_t slot = 0; sequences > 1 && slot < sequences; ++slot) {
        const std::uint32_t place = place_[slot];
        if (place == slot) continue;
        const auto other = static_cast<std::uint32_t>(std::ranges::find(place_, slot) - place_.begin());
        const std::ptrdiff_t to_other = distance(place, slot);
        each_head(place, 0, std::max(written[slot], written[other]), [&](std::span<std::byte> bytes) {
            std::swap_ranges(bytes.begin(), bytes.end(), bytes.data() + to_other);
        });
        std::swap(place_[slot], place_[other]);
        ++swaps;
    }
    return swaps;
}

void KvMemory::copy(std::uint32_t from, std::uint32_t to, std::uint32_t length) {
    const std::ptrdiff_t to_other = distance(place_[from], place_[to]);
    each_head(place_[from], 0, length,
              [&](std::span<std::byte> bytes) { std::memcpy(bytes.data() + to_other, bytes.data(), bytes.size()); });
}

void KvMemory::clear(std::uint32_t slot, std::uint32_t first, std::uint32_t end) {
    each_head(place_[slot], first, end, [](std::span<std::byte> bytes) { std::ranges::fill(bytes, std::byte{0}); });
}

}  // namespace bulkhead::worker::generation

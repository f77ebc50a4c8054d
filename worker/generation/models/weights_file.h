#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ipc/error.h"
#include "ipc/mapping.h"
#include "ipc/wire.h"

namespace bulkhead::worker::generation {

/// One tensor of the file, contiguous, where it is mapped.
struct WeightTensor {
    wire::DType dtype{};
    std::vector<std::int64_t> dims;
    std::span<const std::byte> bytes;
};

/// A safetensors file, mapped once, read-only and private: pages come from the page cache and are shared with whoever
/// maps it too.
///
/// Owns  the mapping; tensors made from it must not outlive it
class WeightsFile {
public:
    /// Checks the header before anything is used: its length, its JSON, and that each tensor lies inside the file, is as
    /// long as dtype and shape say, and starts at a multiple of its element.
    /// Errors  load_failed (missing, unreadable), package_incompatible (truncated, or a header that lies)
    static Result<WeightsFile> open(const std::filesystem::path& path, std::uint64_t expected_bytes);

    [[nodiscard]] const std::map<std::string, WeightTensor, std::less<>>& tensors() const noexcept { return tensors_; }
    /// Null where there is none of that name.
    [[nodiscard]] const WeightTensor* find(std::string_view name) const;
    [[nodiscard]] std::uint64_t size_bytes() const noexcept { return mapping_.bytes().size(); }

private:
    explicit WeightsFile(Mapping mapping) : mapping_{std::move(mapping)} {}
    Result<> read_header(const std::filesystem::path& path);

    Mapping mapping_;
    std::map<std::string, WeightTensor, std::less<>> tensors_;
};

}  // namespace bulkhead::worker::generation

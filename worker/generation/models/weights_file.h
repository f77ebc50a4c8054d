#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ipc/base/error.h"
#include "ipc/base/mapping.h"
#include "ipc/channel/wire.h"
#include "worker/generation/models/huge_pages.h"

namespace bulkhead::worker::generation {

/// One tensor of the file, contiguous, where it is mapped or was copied to.
struct WeightTensor {
    wire::DType dtype{};
    std::vector<std::int64_t> dims;
    std::span<const std::byte> bytes;
};

/// A safetensors file, mapped once, read-only and private: pages come from the page cache and are shared with whoever
/// maps it too, until they are copied.
///
/// Owns  the mapping or the copy; tensors made from it must not outlive it
class WeightsFile {
public:
    /// Checks the header before anything is used: its length, its JSON, and that each tensor lies inside the file, is
    /// as long as dtype and shape say, and starts at a multiple of its element. Errors  load_failed (missing,
    /// unreadable), package_incompatible (truncated, or a header that lies)
    static Result<WeightsFile> open(const std::filesystem::path& path, std::uint64_t expected_bytes);

    /// Copies all tensors into memory of this process and unmaps the file: whoever has a tensor's bytes must ask again.
    /// Leaves them where they are if there are no huge pages, or `go_on`, asked before each part, says no. `done`
    /// counts bytes; at the end `go_on` hears that all are done. Thread  the caller's and `threads` - 1 of its own
    void copy_to_huge_pages(int threads, const std::function<bool(std::uint64_t done)>& go_on);

    [[nodiscard]] const std::map<std::string, WeightTensor, std::less<>>& tensors() const noexcept { return tensors_; }
    /// Null where there is none of that name.
    [[nodiscard]] const WeightTensor* find(std::string_view name) const;
    [[nodiscard]] std::uint64_t size_bytes() const noexcept { return size_bytes_; }
    [[nodiscard]] bool is_copied() const noexcept { return copy_.has_value(); }

private:
    explicit WeightsFile(Mapping mapping) : mapping_{std::move(mapping)}, size_bytes_{mapping_.bytes().size()} {}
    Result<> read_header(const std::filesystem::path& path);

    Mapping mapping_;  ///< empty once copied
    std::optional<HugePages> copy_;
    std::uint64_t size_bytes_;
    std::map<std::string, WeightTensor, std::less<>> tensors_;
};

}  // namespace bulkhead::worker::generation

#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "ipc/base/error.h"
#include "ipc/base/mapping.h"
#include "ipc/channel/wire.h"

namespace bulkhead::worker::generation {

/// One tensor of the file, contiguous, in the mapping or the copy.
struct WeightTensor {
    wire::DType dtype{};
    std::vector<std::int64_t> dims;
    std::span<const std::byte> bytes;
};

/// Anonymous memory in huge pages of 2 MiB, if the kernel provides any. Memory that each step reads
/// as a whole, such as weights, reads 1.1 to 1.5 times as fast as in 4 KiB pages
/// (docs/decisions.md).
struct HugePages {
    Mapping mapping;
    std::span<std::byte> memory;  ///< of it, from a multiple of 2 MiB on

    /// Reserves zeroed memory; pages are allocated when touched. Empty if the system gives no huge
    /// pages or has no free address range.
    [[nodiscard]] static std::optional<HugePages> reserve(std::uint64_t bytes);
};

/// A safetensors file, mapped read-only and private. Until they are copied, its pages are in the
/// page cache, shared with every process that maps the file.
///
/// Owns  the mapping or the copy; tensors made from it must not outlive it
class WeightsFile {
public:
    /// Opens the file and checks its header: length, JSON, and that each tensor lies inside the
    /// file, has the size of dtype and shape, and is aligned to its element.
    /// Errors  load_failed (missing, unreadable), package_incompatible (truncated, or
    ///         a wrong header)
    static Result<WeightsFile> open(const std::filesystem::path& path, std::uint64_t expected_bytes);

    /// Copies all tensors to huge pages and unmaps the file: pointers obtained before become
    /// invalid. Does nothing without huge pages, or if `go_on`, called before each part and at the
    /// end with the bytes done, returns false.
    /// Thread  the caller's and `threads` - 1 of its own
    void copy_to_huge_pages(int threads, const std::function<bool(std::uint64_t done)>& go_on);

    [[nodiscard]] const std::map<std::string, WeightTensor, std::less<>>& tensors() const noexcept { return tensors_; }
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

#pragma once

#include <barrier>
#include <cstddef>
#include <span>
#include <thread>
#include <vector>

namespace bulkhead::worker {

/// memcpy by several cores, each a part: of mapped files, whose pages it is that cost, and where one core is slower than
/// what reads the copy.
///
/// Thread  one at a time
class ParallelCopy {
public:
    /// `threads` >= 1, the caller's among them.
    explicit ParallelCopy(std::ptrdiff_t threads);
    ~ParallelCopy();
    ParallelCopy(const ParallelCopy&) = delete;
    ParallelCopy& operator=(const ParallelCopy&) = delete;

    /// Returns once all is copied. `to` has room for it, and they do not overlap.
    void operator()(std::byte* to, std::span<const std::byte> from);

private:
    void copy_part(std::size_t part) const;
    std::byte* to_ = nullptr;
    std::span<const std::byte> from_;  ///< empty: the helpers end
    std::barrier<> begin_;
    std::barrier<> end_;
    std::vector<std::jthread> helpers_;
};

}  // namespace bulkhead::worker

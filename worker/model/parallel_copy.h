#pragma once

#include <condition_variable>
#include <cstddef>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

namespace bulkhead::worker {

/// memcpy by several cores, piece by piece: of mapped files, whose pages it is that cost, and where one core is slower
/// than what reads the copy. Whoever is free takes the next piece, so a helper that wakes late holds nobody up.
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
    void copy_pieces(std::unique_lock<std::mutex>& lock);  ///< until none is left to take

    std::mutex mutex_;
    std::condition_variable begin_;
    std::condition_variable end_;
    std::byte* to_ = nullptr;
    std::span<const std::byte> left_;  ///< what nobody has taken yet
    std::size_t copying_ = 0;          ///< pieces
    bool ending_ = false;
    std::vector<std::jthread> helpers_;
};

}  // namespace bulkhead::worker

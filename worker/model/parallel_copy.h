#pragma once

#include <condition_variable>
#include <cstddef>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

namespace bulkhead::worker {

/// memcpy on several cores, for mapped files, whose page faults are slow, and where one core is
/// slower than the reader of the copy. Each free thread takes the next piece, so a helper that
/// wakes late delays no other.
///
/// Thread  one at a time
class ParallelCopy {
public:
    /// `threads` >= 1, including the caller's.
    explicit ParallelCopy(std::ptrdiff_t threads);
    ~ParallelCopy();
    ParallelCopy(const ParallelCopy&) = delete;
    ParallelCopy& operator=(const ParallelCopy&) = delete;

    /// Returns once all is copied. `to` must have room and must not overlap `from`.
    void operator()(std::byte* to, std::span<const std::byte> from);

private:
    void copy_pieces(std::unique_lock<std::mutex>& lock);  ///< until all pieces are taken

    std::mutex mutex_;
    std::condition_variable begin_;
    std::condition_variable end_;
    std::byte* to_ = nullptr;
    std::span<const std::byte> left_;  ///< pieces not taken yet
    std::size_t copying_ = 0;          ///< pieces being copied
    bool ending_ = false;
    std::vector<std::jthread> helpers_;
};

}  // namespace bulkhead::worker

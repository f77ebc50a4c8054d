#include "worker/model/parallel_copy.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace bulkhead::worker {
namespace {

constexpr std::size_t shared_bytes_min = 256 << 10;  ///< less is copied before a helper wakes
constexpr std::size_t piece_bytes = 1 << 20;         ///< about 0.1 ms: much longer than a lock,
                                                     ///< shorter than a slot

}  // namespace

ParallelCopy::ParallelCopy(std::ptrdiff_t threads) {
    for (std::ptrdiff_t i = 1; i < threads; ++i)
        helpers_.emplace_back([this] {
            std::unique_lock lock{mutex_};
            for (;;) {
                begin_.wait(lock, [this] { return ending_ || !left_.empty(); });
                if (ending_) return;
                copy_pieces(lock);
            }
        });
}

ParallelCopy::~ParallelCopy() {
    const std::scoped_lock lock{mutex_};
    ending_ = true;
    begin_.notify_all();
}

void ParallelCopy::operator()(std::byte* to, std::span<const std::byte> from) {
    if (from.size() < shared_bytes_min || helpers_.empty()) {
        if (!from.empty()) std::memcpy(to, from.data(), from.size());
        return;
    }
    std::unique_lock lock{mutex_};
    to_ = to;
    left_ = from;
    begin_.notify_all();
    copy_pieces(lock);
    end_.wait(lock, [this] { return copying_ == 0; });
}

void ParallelCopy::copy_pieces(std::unique_lock<std::mutex>& lock) {
    while (!left_.empty()) {
        // Splits the rest among all threads if it is less than a piece each.
        const std::size_t each = left_.size() / (helpers_.size() + 1) + 1;
        const auto piece = left_.first(std::min({left_.size(), piece_bytes, std::max(each, shared_bytes_min / 4)}));
        std::byte* const to = std::exchange(to_, to_ + piece.size());
        left_ = left_.subspan(piece.size());
        ++copying_;
        lock.unlock();
        std::memcpy(to, piece.data(), piece.size());
        lock.lock();
        if (--copying_ == 0 && left_.empty()) end_.notify_one();
    }
}

}  // namespace bulkhead::worker

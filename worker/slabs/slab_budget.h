#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>

#include <fmt/format.h>

#include "ipc/base/error.h"

namespace bulkhead::worker {

/// What the slabs of all channels of a worker may take together, `channel.worker_max`.
///
/// Thread  any
class SlabBudget : public std::enable_shared_from_this<SlabBudget> {
public:
    explicit SlabBudget(std::uint64_t bytes_max) : bytes_max_{bytes_max} {}

    /// Some of the budget, given back by the destructor.
    class Share {
    public:
        Share() = default;
        Share(std::shared_ptr<SlabBudget> budget, std::uint64_t bytes) : budget_{std::move(budget)}, bytes_{bytes} {}
        Share(Share&& other) noexcept : budget_{std::move(other.budget_)}, bytes_{std::exchange(other.bytes_, 0)} {}
        Share& operator=(Share&& other) noexcept {
            const Share previous{std::move(*this)};  // given back at this brace
            budget_ = std::move(other.budget_);
            bytes_ = std::exchange(other.bytes_, 0);
            return *this;
        }
        /// Both in one; of the same budget.
        void join(Share other) noexcept { bytes_ += std::exchange(other.bytes_, 0); }
        ~Share() {
            if (budget_) budget_->used_ -= bytes_;
        }

    private:
        std::shared_ptr<SlabBudget> budget_;
        std::uint64_t bytes_ = 0;
    };

    /// Errors  resources_exhausted naming the key
    [[nodiscard]] Result<Share> take(std::uint64_t bytes) {
        std::uint64_t used = used_;
        do {
            if (bytes > bytes_max_ - used)
                return Error{ErrorCode::resources_exhausted,
                             fmt::format("a slab of {} bytes; the slabs of all channels of this worker have {} of {}",
                                         bytes, used, bytes_max_),
                             "close channels or give results back, or raise `channel.worker_max` of the model"};
        } while (!used_.compare_exchange_weak(used, used + bytes));
        return Share{shared_from_this(), bytes};
    }
    [[nodiscard]] std::uint64_t used_bytes() const noexcept { return used_; }

private:
    const std::uint64_t bytes_max_;
    std::atomic<std::uint64_t> used_ = 0;
};

}  // namespace bulkhead::worker

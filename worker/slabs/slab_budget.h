#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

namespace bulkhead::worker {

/// A limit shared by slabs, in bytes or in number.
///
/// Thread  any
class SlabBudget : public std::enable_shared_from_this<SlabBudget> {
public:
    explicit SlabBudget(std::uint64_t max) : max_{max} {}

    /// A part of the budget; its last owner returns it.
    using Share = std::shared_ptr<const void>;

    /// Nothing if `amount` exceeds the remaining budget.
    [[nodiscard]] Share take(std::uint64_t amount) {
        std::uint64_t used = used_;
        do
            if (amount > max_ - used) return nullptr;
        while (!used_.compare_exchange_weak(used, used + amount));
        return {this, [self = shared_from_this(), amount](const void*) { self->used_ -= amount; }};
    }
    [[nodiscard]] std::uint64_t max() const noexcept { return max_; }
    [[nodiscard]] std::uint64_t used() const noexcept { return used_; }
    [[nodiscard]] std::uint64_t left() const noexcept { return max_ - used_; }

private:
    const std::uint64_t max_;
    std::atomic<std::uint64_t> used_ = 0;
};

}  // namespace bulkhead::worker

#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

#include <fmt/format.h>

#include "ipc/base/error.h"

namespace bulkhead::worker {

/// A limit shared by slabs, in bytes or in number.
///
/// Thread  any
class SlabBudget : public std::enable_shared_from_this<SlabBudget> {
public:
    explicit SlabBudget(std::uint64_t max) : max_{max} {}

    /// A part of the budget; the destructor returns it.
    class Share {
    public:
        Share() = default;
        Share(std::shared_ptr<SlabBudget> budget, std::uint64_t amount) : budget_{std::move(budget)}, amount_{amount} {}
        Share(Share&& other) noexcept : budget_{std::move(other.budget_)}, amount_{other.amount_} {}
        Share& operator=(Share&& other) noexcept {
            const Share previous{std::move(*this)};  // returned at this brace
            budget_ = std::move(other.budget_);
            amount_ = other.amount_;
            return *this;
        }
        ~Share() {
            if (budget_) budget_->used_ -= amount_;
        }

    private:
        std::shared_ptr<SlabBudget> budget_;
        std::uint64_t amount_ = 0;
    };

    /// Nothing if `amount` exceeds the remaining budget.
    [[nodiscard]] std::optional<Share> take(std::uint64_t amount) {
        std::uint64_t used = used_;
        do
            if (amount > max_ - used) return std::nullopt;
        while (!used_.compare_exchange_weak(used, used + amount));
        return Share{shared_from_this(), amount};
    }
    [[nodiscard]] std::uint64_t max() const noexcept { return max_; }
    [[nodiscard]] std::uint64_t used() const noexcept { return used_; }
    [[nodiscard]] std::uint64_t left() const noexcept { return max_ - used_; }

private:
    const std::uint64_t max_;
    std::atomic<std::uint64_t> used_ = 0;
};

}  // namespace bulkhead::worker

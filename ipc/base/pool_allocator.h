#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <mutex>
#include <new>
#include <type_traits>
#include <utility>

namespace bulkhead {

/// Blocks of one size that are used again instead of being freed. It holds as many as were ever in use at once.
///
/// Owns    every block that was given back; dies with the last allocator that shares it, so a block may outlive
///         whoever made the pool
/// Thread  any
class BlockPool {
public:
    BlockPool() = default;
    ~BlockPool() {
        while (free_ != nullptr) ::operator delete(std::exchange(free_, free_->next));
    }
    BlockPool(const BlockPool&) = delete;
    BlockPool& operator=(const BlockPool&) = delete;

    /// The first call says which size the pool keeps; others go to the heap.
    [[nodiscard]] void* allocate(std::size_t size_bytes) {
        {
            const std::lock_guard lock{mutex_};
            if (block_bytes_ == 0) block_bytes_ = size_bytes;
            if (size_bytes == block_bytes_ && free_ != nullptr) return std::exchange(free_, free_->next);
        }
        return ::operator new(std::max(size_bytes, sizeof(Free)));
    }
    void release(void* block, std::size_t size_bytes) noexcept {
        const std::lock_guard lock{mutex_};
        if (size_bytes == block_bytes_)
            free_ = new (block) Free{free_};
        else
            ::operator delete(block);
    }

private:
    struct Free {
        Free* next;
    };
    std::mutex mutex_;
    std::size_t block_bytes_ = 0;
    Free* free_ = nullptr;
};

/// An allocator for containers with nodes and for `allocate_shared`: in the steady state it asks the heap for nothing.
/// Copies share one pool.
template <typename T>
class PoolAllocator {
public:
    using value_type = T;
    using propagate_on_container_move_assignment = std::true_type;
    using propagate_on_container_swap = std::true_type;

    PoolAllocator() : pool_{std::make_shared<BlockPool>()} {}
    explicit PoolAllocator(std::shared_ptr<BlockPool> pool) noexcept : pool_{std::move(pool)} {}
    // No move: a container that was moved from may be used again.
    PoolAllocator(const PoolAllocator& other) noexcept = default;
    PoolAllocator& operator=(const PoolAllocator& other) noexcept = default;
    template <typename U>
    PoolAllocator(const PoolAllocator<U>& other) noexcept : pool_{other.pool()} {}

    [[nodiscard]] T* allocate(std::size_t count) {
        static_assert(alignof(T) <= __STDCPP_DEFAULT_NEW_ALIGNMENT__);  // here T is complete
        return static_cast<T*>(pool_->allocate(count * sizeof(T)));
    }
    void deallocate(T* block, std::size_t count) noexcept { pool_->release(block, count * sizeof(T)); }

    [[nodiscard]] const std::shared_ptr<BlockPool>& pool() const noexcept { return pool_; }
    template <typename U>
    friend bool operator==(const PoolAllocator& a, const PoolAllocator<U>& b) noexcept {
        return a.pool_ == b.pool();
    }

private:
    std::shared_ptr<BlockPool> pool_;
};

}  // namespace bulkhead

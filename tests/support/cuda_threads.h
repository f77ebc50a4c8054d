#pragma once

/// CUDA's threads on a host: enough of the language to run the body of a kernel. Each thread of
/// each block of a cluster is a thread of its own, so what barriers order, and nothing else, is
/// ordered for ThreadSanitizer as well. The clusters of a grid run one after another. To be
/// included before the kernel's header.

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <memory>
#include <thread>
#include <vector>

#define __device__  // NOLINT: the language's own name

namespace bulkhead::cuda_threads {

struct Index {
    unsigned x = 0;
    unsigned y = 0;
};
/// Its threads sleep at once. Those of std::barrier first give way, four times each: hundreds of
/// them to one another.
class Barrier {
public:
    explicit Barrier(unsigned count) : count_{count}, missing_{count} {}
    void arrive_and_wait() {
        const unsigned turn = turn_.load(std::memory_order_relaxed);
        if (missing_.fetch_sub(1, std::memory_order_acq_rel) == 1) {
            missing_.store(count_, std::memory_order_relaxed);
            turn_.store(turn + 1, std::memory_order_release);
            ::syscall(SYS_futex, &turn_, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
        }
        while (turn_.load(std::memory_order_acquire) == turn)
            ::syscall(SYS_futex, &turn_, FUTEX_WAIT_PRIVATE, turn, nullptr, nullptr, 0);
    }

private:
    const unsigned count_;
    std::atomic<unsigned> missing_;
    std::atomic<unsigned> turn_{0};
};
struct Warp {
    Barrier barrier{32};
    /// Of every other shuffle: who waits at the second's barrier has read what the first one left.
    unsigned long long values[2][32]{};
};
struct Block {
    explicit Block(unsigned threads) : barrier{threads}, warps(threads / 32) {}
    Barrier barrier;
    std::vector<Warp> warps;
};
struct Place {
    Index thread;
    Index block;
    Block* its_block = nullptr;
    Barrier* cluster = nullptr;
    unsigned shuffles = 0;  ///< of its warp

    [[nodiscard]] unsigned lane() const { return thread.x % 32; }
    [[nodiscard]] Warp& warp() const { return its_block->warps[thread.x / 32]; }
};
inline thread_local Place here;

/// Runs kernel(rank of the block in its cluster) in all threads of a grid of `blocks`, of which
/// `cluster` in a row of x run at the same time.
template <typename Kernel>
void run_grid(Index blocks, unsigned cluster, unsigned threads, const Kernel& kernel) {
    Barrier all{cluster * threads};
    std::vector<std::unique_ptr<Block>> in_cluster;
    for (unsigned rank = 0; rank < cluster; ++rank) in_cluster.push_back(std::make_unique<Block>(threads));
    std::vector<std::jthread> running;
    for (unsigned rank = 0; rank < cluster; ++rank)
        for (unsigned thread = 0; thread < threads; ++thread)
            running.emplace_back([&, rank, thread] {
                here = {{thread, 0}, {}, in_cluster[rank].get(), &all};
                for (unsigned y = 0; y < blocks.y; ++y)
                    for (unsigned first = 0; first < blocks.x; first += cluster) {
                        here.block = {first + rank, y};
                        kernel(rank);
                        all.arrive_and_wait();
                    }
            });
}

/// What `from(lane)` of the warp gave; all its lanes take part.
template <typename From>
unsigned long long shuffle(unsigned mask, unsigned long long value, const From& from) {
    if (mask != 0xffff'ffffU) std::terminate();
    Warp& warp = here.warp();
    auto& values = warp.values[here.shuffles++ % 2];
    values[here.lane()] = value;
    warp.barrier.arrive_and_wait();
    return values[from(here.lane())];
}

}  // namespace bulkhead::cuda_threads

#define threadIdx (bulkhead::cuda_threads::here.thread)
#define blockIdx (bulkhead::cuda_threads::here.block)

inline void __syncthreads() { bulkhead::cuda_threads::here.its_block->barrier.arrive_and_wait(); }
inline void cluster_barrier() { bulkhead::cuda_threads::here.cluster->arrive_and_wait(); }
inline unsigned long long __shfl_xor_sync(unsigned mask, unsigned long long value, unsigned distance) {
    return bulkhead::cuda_threads::shuffle(mask, value, [=](unsigned lane) { return lane ^ distance; });
}
inline unsigned long long __shfl_up_sync(unsigned mask, unsigned long long value, unsigned distance) {
    return bulkhead::cuda_threads::shuffle(mask, value,
                                           [=](unsigned lane) { return lane >= distance ? lane - distance : lane; });
}
template <typename T>
T atomicAdd(T* to, T value) {
    return std::atomic_ref{*to}.fetch_add(value, std::memory_order_relaxed);
}

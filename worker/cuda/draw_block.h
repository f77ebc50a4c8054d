#pragma once

/// The sampler's kernel, without its launch. nvcc compiles it (generation_kernels.cu), and the unit
/// tests compile it to run on host threads. One block draws a row, or a cluster of blocks: these
/// run at the same time, so they can wait for each other, and they share device memory.
///
/// Shared memory has no native 64-bit atomic add. A compare-and-swap loop replaces it, in which
/// lanes of a warp that add to one bin wait for each other. So each bin has two 32-bit halves: the
/// thread whose add overflows the lower half carries into the upper one, and the total is exact in
/// any order. Device memory has the native add.

#include "worker/cuda/device_slots.h"

/// Issues the loads of four loop iterations before it waits for the first.
#if defined(__CUDACC__)
#define BULKHEAD_FOUR_AT_ONCE _Pragma("unroll 4")
#else
#define BULKHEAD_FOUR_AT_ONCE
#endif

namespace bulkhead::worker::cuda {

/// Shared memory of a block with this many threads.
template <unsigned threads>
struct BlockScratch {
    std::uint32_t low[generation::draw::bins];
    std::uint32_t high[generation::draw::bins];
    generation::draw::Candidate list[generation::draw::list_max];
    Wide reduced[threads / 32 + 1];
    std::uint32_t listed;
    std::uint32_t place;  ///< where this block's part begins in the whole list
    generation::draw::Found found;
};

/// The threads of `blocks` blocks, or of one block: the `Team` of worker/generation/sampler_core.h.
template <unsigned threads, bool several>
class CudaTeam {
public:
    using Scratch = BlockScratch<threads>;

    __device__ explicit CudaTeam(Scratch& own) : own_{own} { static_assert(!several); }
    __device__ CudaTeam(Scratch& own, RowScratch& row, unsigned rank, unsigned blocks)
        : own_{own}, row_{&row}, rank_{rank}, blocks_{blocks} {
        // The other blocks see this after the first maximum.
        for (unsigned bin = thread(); bin < bins; bin += all_threads()) row.weight[0][bin] = 0;
        if (thread() == 0) row.listed = 0;
    }

    __device__ Wide max(std::uint32_t n, const auto& f) {
        Wide greatest = 0;
        BULKHEAD_FOUR_AT_ONCE
        for (std::uint32_t i = thread(); i < n; i += all_threads()) greatest = larger(greatest, f(i));
        return greatest_of_all(greatest);
    }
    __device__ Wide max_quads(std::uint32_t n, const auto& f) {
        Wide greatest = 0;
        for (std::uint32_t i = 4 * thread(); i < n; i += 4 * all_threads()) greatest = larger(greatest, f(i));
        return greatest_of_all(greatest);
    }
    __device__ void histogram(std::uint32_t n, const auto& f) {
        for (unsigned bin = threadIdx.x; bin < bins; bin += threads) own_.low[bin] = own_.high[bin] = 0;
        __syncthreads();
        BULKHEAD_FOUR_AT_ONCE
        for (std::uint32_t i = thread(); i < n; i += all_threads()) {
            const generation::draw::Share share = f(i);
            if (share.weight != 0) add(share);
        }
        __syncthreads();
        if constexpr (several) {
            filled_ = (filled_ + 1) % 3;
            Wide* const sums = row_->weight[filled_];
            // All threads read it before the last barrier.
            Wide* const next = row_->weight[(filled_ + 1) % 3];
            for (unsigned bin = thread(); bin < bins; bin += all_threads()) next[bin] = 0;
            for (unsigned bin = threadIdx.x; bin < bins; bin += threads)
                if (const Wide weight = own_weight(bin); weight != 0) atomicAdd(&sums[bin], weight);
            wait_for_all();
        }
    }
    __device__ generation::draw::Found find(const auto& target_of) {
        constexpr unsigned each_thread = bins / threads;
        const unsigned begin = threadIdx.x * each_thread;
        Wide weight[each_thread];
        Wide sum = 0;
        for (unsigned i = 0; i < each_thread; ++i) {
            if constexpr (several)
                weight[i] = row_->weight[filled_][begin + i];
            else
                weight[i] = own_weight(begin + i);
            sum += weight[i];
        }
        const Wide until = before(sum) + sum;
        const Wide target = target_of(own_.reduced[warps]);
        if (threadIdx.x == 0 && own_.reduced[warps] < target) own_.found = {bins, own_.reduced[warps], target};
        if (until - sum < target && until >= target) {  // true in at most one thread
            Wide above = until - sum;
            unsigned bin = begin;
            for (unsigned i = 0; i + 1 < each_thread && above + weight[i] < target; ++i) {
                above += weight[i];
                ++bin;
            }
            own_.found = {bin, above, target};
        }
        __syncthreads();
        return own_.found;
    }
    __device__ std::uint32_t gather(std::uint32_t n, const float* z, const auto& keeps) {
        if (threadIdx.x == 0) own_.listed = 0;
        __syncthreads();
        BULKHEAD_FOUR_AT_ONCE
        for (std::uint32_t i = thread(); i < n; i += all_threads()) {
            const float own = z[i];
            if (!keeps(own)) continue;
            const std::uint32_t place = atomicAdd(&own_.listed, 1U);
            if (place < list_max) own_.list[place] = {own, i};
        }
        __syncthreads();
        const std::uint32_t listed = own_.listed;
        if constexpr (!several) return listed;
        if (threadIdx.x == 0) own_.place = atomicAdd(&row_->listed, listed);
        __syncthreads();
        const std::uint32_t place = own_.place;
        if (place + listed <= list_max)
            for (unsigned i = threadIdx.x; i < listed; i += threads) row_->list[place + i] = own_.list[i];
        wait_for_all();
        return row_->listed;
    }
    __device__ std::uint32_t in_one_block(const auto& f) {
        if constexpr (!several) return f(*this);
        if (rank_ == 0) {
            const std::uint32_t listed = row_->listed;
            for (unsigned i = threadIdx.x; i < listed; i += threads) own_.list[i] = row_->list[i];
            __syncthreads();
            CudaTeam<threads, false> block{own_};
            const std::uint32_t drawn = f(block);
            if (threadIdx.x == 0) row_->drawn = drawn;
        }
        wait_for_all();
        return row_->drawn;
    }
    __device__ const generation::draw::Candidate* list() const { return own_.list; }

private:
    static constexpr unsigned warps = threads / 32;
    static constexpr unsigned all_lanes = 0xffff'ffffU;
    static constexpr unsigned bins = generation::draw::bins;
    static constexpr unsigned list_max = generation::draw::list_max;
    static_assert(threads % 32 == 0 && warps <= 32 && bins % threads == 0);

    __device__ static Wide larger(Wide a, Wide b) { return a > b ? a : b; }
    __device__ unsigned thread() const { return several ? rank_ * threads + threadIdx.x : threadIdx.x; }
    __device__ unsigned all_threads() const { return several ? blocks_ * threads : threads; }

    /// A barrier: all blocks see what any block wrote before it, in device memory too.
    __device__ static void wait_for_all() {
        if constexpr (several) cluster_barrier();
    }

    __device__ void add(const generation::draw::Share& share) {
        const auto low = static_cast<std::uint32_t>(share.weight);
        auto high = static_cast<std::uint32_t>(share.weight >> 32);
        const std::uint32_t before = atomicAdd(&own_.low[share.bin], low);
        high += before + low < before ? 1U : 0U;
        if (high != 0) atomicAdd(&own_.high[share.bin], high);
    }
    __device__ Wide own_weight(unsigned bin) const { return Wide{own_.high[bin]} << 32 | own_.low[bin]; }

    __device__ Wide greatest_of_all(Wide value) {
        for (unsigned distance = 16; distance > 0; distance /= 2)
            value = larger(value, __shfl_xor_sync(all_lanes, value, distance));
        if (threadIdx.x % 32 == 0) own_.reduced[threadIdx.x / 32] = value;
        __syncthreads();
        value = threadIdx.x % 32 < warps ? own_.reduced[threadIdx.x % 32] : 0;
        for (unsigned distance = 16; distance > 0; distance /= 2)
            value = larger(value, __shfl_xor_sync(all_lanes, value, distance));
        __syncthreads();  // before any thread writes `reduced` again
        if constexpr (several) {
            Wide* const part = row_->part[parted_];
            parted_ = 1 - parted_;
            if (threadIdx.x == 0) part[rank_] = value;
            wait_for_all();
            // Each lane takes its own; then the maximum of all.
            const unsigned from = threadIdx.x % row_blocks_max;
            value = from < blocks_ ? part[from] : 0;
            for (unsigned distance = row_blocks_max / 2; distance > 0; distance /= 2)
                value = larger(value, __shfl_xor_sync(all_lanes, value, distance));
        }
        return value;
    }

    /// Returns the sum of `value` over the block's earlier threads; leaves the total in
    /// reduced[warps].
    __device__ Wide before(Wide value) {
        const unsigned lane = threadIdx.x % 32;
        const unsigned warp = threadIdx.x / 32;
        Wide until = value;  // includes this thread
        for (unsigned distance = 1; distance < 32; distance *= 2) {
            const Wide other = __shfl_up_sync(all_lanes, until, distance);
            if (lane >= distance) until += other;
        }
        if (lane == 31) own_.reduced[warp] = until;
        __syncthreads();
        if (warp == 0) {
            Wide of_warps = lane < warps ? own_.reduced[lane] : 0;
            for (unsigned distance = 1; distance < 32; distance *= 2) {
                const Wide other = __shfl_up_sync(all_lanes, of_warps, distance);
                if (lane >= distance) of_warps += other;
            }
            if (lane < warps) own_.reduced[lane] = of_warps;
            if (lane == 31) own_.reduced[warps] = of_warps;
        }
        __syncthreads();
        return until - value + (warp == 0 ? 0 : own_.reduced[warp - 1]);
    }

    Scratch& own_;
    RowScratch* row_ = nullptr;
    unsigned rank_ = 0;
    unsigned blocks_ = 1;
    unsigned filled_ = 2;  ///< the histogram that `find` reads; the first is the next one
    unsigned parted_ = 0;
};

/// Blocks (c * row_blocks …, i): codebook c of slot first + i.
template <unsigned threads, bool several>
__device__ void draw_block(BlockScratch<threads>& scratch, const DeviceSlots& slots, const float* logits,
                           std::uint32_t first) {
    if (blockIdx.y >= *slots.active) return;
    const std::uint32_t blocks = several ? slots.row_blocks : 1;
    const std::uint32_t codebook = blockIdx.x / blocks;
    const std::uint32_t rank = blockIdx.x % blocks;
    const std::uint32_t slot = first + blockIdx.y;
    const std::uint32_t codebooks = slots.rules.codebooks;
    const SlotState& state = slots.states[slot];
    const std::uint64_t place = std::uint64_t{slot} * codebooks + codebook;
    const std::int32_t* forced = slots.forced + std::uint64_t{slot} * generation::limits::forced_steps_max * codebooks;
    Drawn drawn{};
    if (!state.stopped && !generation::request_forces(state, slots.rules, forced, codebook, drawn.token) &&
        // The same for all threads.
        !generation::delay_forces(state, slots.rules, codebook, drawn.token)) {
        const std::uint64_t vocabulary = slots.rules.vocabulary;
        const std::uint32_t rows = slots.rules.guided ? 2 : 1;
        const float* own = logits + (std::uint64_t{blockIdx.y} * rows * codebooks + codebook) * vocabulary;
        const generation::DrawRow row{own,
                                      slots.rules.guided ? own + codebooks * vocabulary : nullptr,
                                      slots.flags + place * vocabulary,
                                      slots.adjusted + place * vocabulary,
                                      codebook,
                                      slots.rules.vocabulary};
        if constexpr (several) {
            CudaTeam<threads, true> team{scratch, slots.rows[place], rank, blocks};
            drawn = generation::draw_row(team, row, slots.rules, state);
        } else {
            CudaTeam<threads, false> team{scratch};
            drawn = generation::draw_row(team, row, slots.rules, state);
        }
    }
    if (rank == 0 && threadIdx.x == 0) slots.drawn[place] = drawn;
}

}  // namespace bulkhead::worker::cuda

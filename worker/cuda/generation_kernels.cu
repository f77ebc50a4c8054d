// Compiled by nvcc with each operation rounded by itself (--fmad=false);
// worker/generation/exact_math.h says why.

#include "worker/cuda/generation_kernels.h"

namespace bulkhead::worker::cuda {
namespace {

__device__ inline void cluster_barrier() {
#if __CUDA_ARCH__ >= 900
    __cluster_barrier_arrive();  // releases and acquires
    __cluster_barrier_wait();
#else
    __trap();  // never launched there
#endif
}

}  // namespace
}  // namespace bulkhead::worker::cuda

#include "worker/cuda/draw_block.h"

namespace bulkhead::worker::cuda {
namespace {

namespace generation_limits = generation::limits;

constexpr unsigned block_threads = 1024;

__global__ void stage_kernel(DeviceSlots slots, std::uint32_t n) {
    const std::uint32_t slot = threadIdx.x;
    if (slot >= n) return;
    const SlotState& state = slots.states[slot];
    for (std::uint32_t c = 0; c < slots.rules.codebooks; ++c)
        slots.tokens[slot * slots.rules.codebooks + c] = state.input[c];
    slots.positions[slot] = min(state.position, static_cast<std::int64_t>(slots.length) - 1);
    slots.deltas[slot] = state.rope_delta;
}

template <bool several>
__global__ void __launch_bounds__(block_threads) draw_kernel(DeviceSlots slots, const float* logits,
                                                             std::uint32_t first) {
    __shared__ BlockScratch<block_threads> scratch;
    draw_block<block_threads, several>(scratch, slots, logits, first);
}

/// The launch configuration of `draw_kernel<true>` for n slots. It points into itself, so
/// it is not moved.
struct ClusterLaunch {
    ClusterLaunch(std::uint32_t codebooks, std::uint32_t row_blocks, std::uint32_t n, cudaStream_t stream) {
        attribute.id = cudaLaunchAttributeClusterDimension;
        attribute.val.clusterDim = {row_blocks, 1, 1};
        config.gridDim = {codebooks * row_blocks, n, 1};
        config.blockDim = {block_threads, 1, 1};
        config.stream = stream;
        config.attrs = &attribute;
        config.numAttrs = 1;
    }
    ClusterLaunch(const ClusterLaunch&) = delete;
    ClusterLaunch& operator=(const ClusterLaunch&) = delete;

    cudaLaunchAttribute attribute{};
    cudaLaunchConfig_t config{};
};

__global__ void advance_kernel(DeviceSlots slots, std::uint32_t first, std::uint32_t n, bool wrote_kv) {
    const std::uint32_t turn = *slots.turn;
    if (threadIdx.x < min(n, *slots.active)) {
        const std::uint32_t slot = first + threadIdx.x;
        const std::uint32_t codebooks = slots.rules.codebooks;
        SlotState& state = slots.states[slot];
        GivenStep given{};
        generation::advance(state, slots.rules, slots.drawn + slot * codebooks,
                            slots.forced + std::uint64_t{slot} * generation_limits::forced_steps_max * codebooks,
                            slots.flags + std::uint64_t{slot} * codebooks * slots.rules.vocabulary, wrote_kv,
                            given.tokens);
        given.stop = state.stopped ? 1U : 0U;
        given.not_finite = state.not_finite ? 1U : 0U;
        slots.given[(turn % given_turns) * slots.slots + slot] = given;
    }
    __syncthreads();
    if (threadIdx.x == 0) *slots.turn = turn + 1;
}

__global__ void active_kernel(std::uint32_t* active, std::uint32_t n) { *active = n; }

__global__ void position_kernel(SlotState* state, std::int64_t position, std::int64_t rope_delta) {
    state->position = position;
    state->rope_delta = rope_delta;
}

template <typename Word>
__device__ void swap_words(Word* a, Word* b, std::uint64_t count) {
    for (std::uint64_t i = threadIdx.x; i < count; i += blockDim.x) {
        const Word kept = a[i];
        a[i] = b[i];
        b[i] = kept;
    }
}

/// Exchanges a slot's tables, with one block for each.
__global__ void exchange_tables_kernel(DeviceSlots slots, std::uint32_t a, std::uint32_t b) {
    const std::uint64_t flags = std::uint64_t{slots.rules.codebooks} * slots.rules.vocabulary;
    const std::uint64_t forced = std::uint64_t{slots.rules.codebooks} * generation_limits::forced_steps_max;
    if (blockIdx.x == 0) swap_words(slots.flags + a * flags, slots.flags + b * flags, flags);
    if (blockIdx.x == 1) swap_words(slots.forced + a * forced, slots.forced + b * forced, forced);
    if (blockIdx.x == 2)
        swap_words(reinterpret_cast<unsigned char*>(slots.states + a), reinterpret_cast<unsigned char*>(slots.states + b),
                   sizeof(SlotState));
}

/// The part that one block of the KV kernels works on: one head of one buffer of a slot.
template <typename Word>
__device__ Word* head_of(const DeviceKv& kv, std::uint32_t slot) {
    const std::uint64_t head_bytes = std::uint64_t{kv.length} * kv.position_bytes;
    auto* buffer = static_cast<unsigned char*>(kv.buffers[blockIdx.y]);
    return reinterpret_cast<Word*>(buffer + (std::uint64_t{slot} * kv.heads + blockIdx.x) * head_bytes);
}

template <typename Word>
__global__ void exchange_kv_kernel(DeviceKv kv, std::uint32_t a, std::uint32_t b, std::uint64_t words) {
    swap_words(head_of<Word>(kv, a), head_of<Word>(kv, b), words);
}

template <typename Word>
__global__ void copy_kv_kernel(DeviceKv kv, std::uint32_t from, std::uint32_t to, std::uint64_t words) {
    const Word* source = head_of<Word>(kv, from);
    Word* target = head_of<Word>(kv, to);
    for (std::uint64_t i = threadIdx.x; i < words; i += blockDim.x) target[i] = source[i];
}

template <typename Word>
__global__ void clear_kv_kernel(DeviceKv kv, std::uint32_t slot, std::uint64_t first, std::uint64_t end) {
    Word* target = head_of<Word>(kv, slot);
    for (std::uint64_t i = first + threadIdx.x; i < end; i += blockDim.x) target[i] = Word{};
}

/// Calls `with(Word{}, words of `positions` positions)` for the widest word that divides them.
void with_words(const DeviceKv& kv, const auto& with) {
    if (kv.position_bytes % sizeof(uint4) == 0)
        with(uint4{}, kv.position_bytes / sizeof(uint4));
    else
        with(static_cast<unsigned short>(0), kv.position_bytes / sizeof(unsigned short));
}

constexpr unsigned kv_threads = 256;
dim3 heads_grid(const DeviceKv& kv) { return {kv.heads, kv.count}; }

}  // namespace

std::uint32_t row_blocks_here(std::uint32_t vocabulary) {
    std::uint32_t blocks = row_blocks(vocabulary);
    for (; blocks > 1; blocks /= 2) {
        const ClusterLaunch launch{1, blocks, 1, nullptr};
        int clusters = 0;
        if (cudaOccupancyMaxActiveClusters(&clusters, draw_kernel<true>, &launch.config) == cudaSuccess && clusters > 0)
            break;
        (void)cudaGetLastError();  // a GPU before sm_90 has no clusters
    }
    return blocks;
}

void stage_inputs(const DeviceSlots& slots, std::uint32_t n, cudaStream_t stream) {
    stage_kernel<<<1, generation_limits::slots_max, 0, stream>>>(slots, n);
}

void set_active(const DeviceSlots& slots, std::uint32_t n, cudaStream_t stream) {
    active_kernel<<<1, 1, 0, stream>>>(slots.active, n);
}

void draw_and_advance(const DeviceSlots& slots, const float* logits, std::uint32_t first, std::uint32_t n,
                      bool wrote_kv, cudaStream_t stream) {
    if (slots.row_blocks == 1) {
        draw_kernel<false><<<dim3{slots.rules.codebooks, n}, block_threads, 0, stream>>>(slots, logits, first);
    } else {
        const ClusterLaunch launch{slots.rules.codebooks, slots.row_blocks, n, stream};
        // Errors as for <<<>>>.
        (void)cudaLaunchKernelEx(&launch.config, draw_kernel<true>, slots, logits, first);
    }
    advance_kernel<<<1, generation_limits::slots_max, 0, stream>>>(slots, first, n, wrote_kv);
}

void set_position(const DeviceSlots& slots, std::uint32_t slot, std::int64_t position, std::int64_t rope_delta,
                  cudaStream_t stream) {
    position_kernel<<<1, 1, 0, stream>>>(slots.states + slot, position, rope_delta);
}

void exchange_slots(const DeviceSlots& slots, const DeviceKv& kv, std::uint32_t a, std::uint32_t b,
                    std::uint32_t length, cudaStream_t stream) {
    exchange_tables_kernel<<<3, block_threads, 0, stream>>>(slots, a, b);
    with_words(kv, [&](auto word, std::uint64_t words) {
        exchange_kv_kernel<decltype(word)><<<heads_grid(kv), kv_threads, 0, stream>>>(kv, a, b, words * length);
    });
}

void copy_kv(const DeviceKv& kv, std::uint32_t from, std::uint32_t to, std::uint32_t length, cudaStream_t stream) {
    with_words(kv, [&](auto word, std::uint64_t words) {
        copy_kv_kernel<decltype(word)><<<heads_grid(kv), kv_threads, 0, stream>>>(kv, from, to, words * length);
    });
}

void clear_kv(const DeviceKv& kv, std::uint32_t slot, std::uint32_t first, std::uint32_t end, cudaStream_t stream) {
    with_words(kv, [&](auto word, std::uint64_t words) {
        clear_kv_kernel<decltype(word)>
            <<<heads_grid(kv), kv_threads, 0, stream>>>(kv, slot, words * first, words * end);
    });
}

}  // namespace bulkhead::worker::cuda

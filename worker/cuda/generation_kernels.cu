// Compiled by nvcc, with each operation rounded by itself (--fmad=false): worker/generation/exact_math.h says why.

#include "worker/cuda/generation_kernels.h"
#include "worker/generation/sampler_core.h"

namespace bulkhead::worker::cuda {
namespace {

namespace generation_limits = generation::limits;
using generation::DrawRow;
using generation::DrawScratch;

constexpr unsigned block_threads = 1024;
constexpr unsigned warps = block_threads / 32;
constexpr unsigned all_lanes = 0xffff'ffffU;
using Wide = unsigned long long;  // what CUDA's 64-bit intrinsics take

/// The threads of one CUDA block, as the sampler sees them; `reduced` is shared, of `warps + 1`.
class CudaBlock {
public:
    __device__ explicit CudaBlock(Wide* reduced) : reduced_{reduced} {}

    template <typename F>
    __device__ void each(std::uint32_t n, const F& f) {
        for (std::uint32_t i = threadIdx.x; i < n; i += block_threads) f(i);
        __syncthreads();
    }
    template <typename F>
    __device__ std::uint64_t max(std::uint32_t n, const F& f) {
        Wide greatest = 0;
        for (std::uint32_t i = threadIdx.x; i < n; i += block_threads) greatest = larger(greatest, f(i));
        return reduce(greatest, [](Wide a, Wide b) { return larger(a, b); });
    }
    template <typename F>
    __device__ std::uint64_t max_quads(std::uint32_t n, const F& f) {
        Wide greatest = 0;
        for (std::uint32_t i = 4 * threadIdx.x; i < n; i += 4 * block_threads) greatest = larger(greatest, f(i));
        return reduce(greatest, [](Wide a, Wide b) { return larger(a, b); });
    }
    template <typename F>
    __device__ std::uint64_t sum(std::uint32_t n, const F& f) {
        Wide total = 0;
        for (std::uint32_t i = threadIdx.x; i < n; i += block_threads) total += f(i);
        return reduce(total, [](Wide a, Wide b) { return a + b; });
    }
    template <typename F>
    __device__ void once(const F& f) {
        if (threadIdx.x == 0) f();
        __syncthreads();
    }
    __device__ std::uint32_t add(std::uint32_t& to, std::uint32_t value) { return atomicAdd(&to, value); }
    __device__ std::uint64_t add(std::uint64_t& to, std::uint64_t value) {
        return atomicAdd(reinterpret_cast<Wide*>(&to), static_cast<Wide>(value));
    }
    __device__ void find(const std::uint64_t* weight, std::uint32_t n, std::uint64_t target, std::uint32_t& chosen,
                         std::uint64_t& above) {
        const std::uint32_t each_thread = (n + block_threads - 1) / block_threads;
        const std::uint32_t begin = min(threadIdx.x * each_thread, n);
        const std::uint32_t end = min(begin + each_thread, n);
        Wide own = 0;
        for (std::uint32_t i = begin; i < end; ++i) own += weight[i];
        Wide sum = before(own);
        if (sum < target && sum + own >= target)  // in exactly one thread, where any
            for (std::uint32_t i = begin; i < end; ++i) {
                if (sum + weight[i] >= target) {
                    chosen = i;
                    above = sum;
                    break;
                }
                sum += weight[i];
            }
        const std::uint64_t total = reduced_[warps];
        if (threadIdx.x == 0 && total < target) above = total;
        __syncthreads();
    }

private:
    __device__ static Wide larger(Wide a, Wide b) { return a > b ? a : b; }

    template <typename Combine>
    __device__ Wide reduce(Wide value, const Combine& combine) {
        for (unsigned distance = 16; distance > 0; distance /= 2)
            value = combine(value, __shfl_xor_sync(all_lanes, value, distance));
        if (threadIdx.x % 32 == 0) reduced_[threadIdx.x / 32] = value;
        __syncthreads();
        value = reduced_[threadIdx.x % 32];
        for (unsigned distance = 16; distance > 0; distance /= 2)
            value = combine(value, __shfl_xor_sync(all_lanes, value, distance));
        __syncthreads();  // before anybody writes to `reduced_` again
        return value;
    }

    /// The sum of `value` over all threads before this one; that of all is left in reduced_[warps].
    __device__ Wide before(Wide value) {
        const unsigned lane = threadIdx.x % 32;
        const unsigned warp = threadIdx.x / 32;
        Wide until = value;  // this thread's included
        for (unsigned distance = 1; distance < 32; distance *= 2) {
            const Wide other = __shfl_up_sync(all_lanes, until, distance);
            if (lane >= distance) until += other;
        }
        if (lane == 31) reduced_[warp] = until;
        __syncthreads();
        if (warp == 0) {
            Wide of_warps = reduced_[lane];
            for (unsigned distance = 1; distance < 32; distance *= 2) {
                const Wide other = __shfl_up_sync(all_lanes, of_warps, distance);
                if (lane >= distance) of_warps += other;
            }
            __syncwarp();
            reduced_[lane] = of_warps;
            if (lane == 31) reduced_[warps] = of_warps;
        }
        __syncthreads();
        return until - value + (warp == 0 ? 0 : reduced_[warp - 1]);
    }

    Wide* reduced_;
};

__global__ void stage_kernel(DeviceSlots slots, std::uint32_t n) {
    const std::uint32_t slot = threadIdx.x;
    if (slot >= n) return;
    const SlotState& state = slots.states[slot];
    for (std::uint32_t c = 0; c < slots.rules.codebooks; ++c)
        slots.tokens[slot * slots.rules.codebooks + c] = state.input[c];
    slots.positions[slot] = min(state.position, static_cast<std::int64_t>(slots.length) - 1);
    slots.deltas[slot] = state.rope_delta;
}

/// Block (c, i): codebook c of slot first + i.
__global__ void __launch_bounds__(block_threads) draw_kernel(DeviceSlots slots, const float* logits,
                                                             std::uint32_t first) {
    __shared__ DrawScratch scratch;
    __shared__ Wide reduced[warps + 1];
    if (blockIdx.y >= *slots.active) return;
    const std::uint32_t codebook = blockIdx.x;
    const std::uint32_t slot = first + blockIdx.y;
    const std::uint32_t codebooks = slots.rules.codebooks;
    const SlotState& state = slots.states[slot];
    Drawn& drawn = slots.drawn[slot * codebooks + codebook];
    const std::int32_t* forced = slots.forced + std::uint64_t{slot} * generation_limits::forced_steps_max * codebooks;
    std::int32_t chosen = 0;
    if (state.stopped || generation::request_forces(state, slots.rules, forced, codebook, chosen) ||
        generation::delay_forces(state, slots.rules, codebook, chosen)) {  // the same for all threads
        if (threadIdx.x == 0) drawn = {chosen, 0U};
        return;
    }
    const std::uint64_t vocabulary = slots.rules.vocabulary;
    const std::uint64_t table = (std::uint64_t{slot} * codebooks + codebook) * vocabulary;
    const std::uint32_t rows = slots.rules.guided ? 2 : 1;
    const float* own = logits + (std::uint64_t{blockIdx.y} * rows * codebooks + codebook) * vocabulary;
    const DrawRow row{own,
                      slots.rules.guided ? own + codebooks * vocabulary : nullptr,
                      slots.flags + table,
                      slots.adjusted + table,
                      codebook,
                      slots.rules.vocabulary};
    CudaBlock block{reduced};
    generation::draw_row(block, scratch, row, slots.rules, state);
    if (threadIdx.x == 0) drawn = scratch.drawn;
}

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

/// The last blocks, one for each of a slot's tables.
__global__ void exchange_tables_kernel(DeviceSlots slots, std::uint32_t a, std::uint32_t b) {
    const std::uint64_t flags = std::uint64_t{slots.rules.codebooks} * slots.rules.vocabulary;
    const std::uint64_t forced = std::uint64_t{slots.rules.codebooks} * generation_limits::forced_steps_max;
    if (blockIdx.x == 0) swap_words(slots.flags + a * flags, slots.flags + b * flags, flags);
    if (blockIdx.x == 1) swap_words(slots.forced + a * forced, slots.forced + b * forced, forced);
    if (blockIdx.x == 2)
        swap_words(reinterpret_cast<unsigned char*>(slots.states + a), reinterpret_cast<unsigned char*>(slots.states + b),
                   sizeof(SlotState));
}

/// What a block of the KV kernels works on: one head of one buffer of a slot.
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
template <typename F>
void with_words(const DeviceKv& kv, const F& with) {
    if (kv.position_bytes % sizeof(uint4) == 0)
        with(uint4{}, kv.position_bytes / sizeof(uint4));
    else
        with(static_cast<unsigned short>(0), kv.position_bytes / sizeof(unsigned short));
}

constexpr unsigned kv_threads = 256;
dim3 heads_grid(const DeviceKv& kv) { return {kv.heads, kv.count}; }

}  // namespace

void stage_inputs(const DeviceSlots& slots, std::uint32_t n, cudaStream_t stream) {
    stage_kernel<<<1, generation_limits::slots_max, 0, stream>>>(slots, n);
}

void set_active(const DeviceSlots& slots, std::uint32_t n, cudaStream_t stream) {
    active_kernel<<<1, 1, 0, stream>>>(slots.active, n);
}

void draw_and_advance(const DeviceSlots& slots, const float* logits, std::uint32_t first, std::uint32_t n,
                      bool wrote_kv, cudaStream_t stream) {
    draw_kernel<<<dim3{slots.rules.codebooks, n}, block_threads, 0, stream>>>(slots, logits, first);
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

#pragma once

/// Our own kernels: the sampler, the state of sequences, and moves of KV. All run in stream order on fixed addresses, so
/// that a whole step can be captured.

#include <cuda_runtime_api.h>

#include "worker/generation/slot_state.h"

namespace bulkhead::worker::cuda {

using generation::Drawn;
using generation::DrawRules;
using generation::SlotState;

/// What one slot gave in one step, in pinned host memory that the GPU writes to.
struct GivenStep {
    std::int32_t tokens[generation::limits::codebooks_max];
    std::uint32_t stop;
    std::uint32_t not_finite;
};

/// Launches whose results may wait to be collected, and one that is being written.
inline constexpr std::uint32_t given_turns = 4;

/// Device memory of all sequences, at addresses that never change. Sizes: S slots, C codebooks, V vocabulary.
struct DeviceSlots {
    SlotState* states;       ///< [S]
    std::uint8_t* flags;     ///< [S, C, V]
    std::int32_t* forced;    ///< [S, forced_steps_max, C]
    float* adjusted;         ///< [S, C, V], scratch of the sampler
    Drawn* drawn;            ///< [S, C]
    std::int64_t* tokens;    ///< [S, C], decode's first argument
    std::int64_t* positions; ///< [S]
    std::int64_t* deltas;    ///< [S]
    std::uint32_t* turn;     ///< steps since the load
    std::uint32_t* active;   ///< slots that the next draws are for; further rows of a captured step only ride along
    GivenStep* given;        ///< [given_turns, S], on the host
    std::uint32_t slots;
    std::uint32_t length;
    DrawRules rules;
};

/// Where the KV lies: `buffers` device pointers in device memory, each [S, rows * heads, length, position_bytes].
struct DeviceKv {
    void* const* buffers;
    std::uint32_t count;           ///< K and V of each layer
    std::uint32_t heads;           ///< rows * heads
    std::uint32_t length;          ///< positions
    std::uint32_t position_bytes;  ///< of one head; a multiple of 2
};

/// Decode's arguments of slots [0, n), from their states.
void stage_inputs(const DeviceSlots& slots, std::uint32_t n, cudaStream_t stream);
/// Stays so until it is set again.
void set_active(const DeviceSlots& slots, std::uint32_t n, cudaStream_t stream);
/// Draws from `logits` float32 [n * R, C, V] for slots [first, first + min(n, active)), and takes the draws over into their
/// states; those of other slots stay as they are. Their results stand in `given` under the turn that was counted before.
void draw_and_advance(const DeviceSlots& slots, const float* logits, std::uint32_t first, std::uint32_t n,
                      bool wrote_kv, cudaStream_t stream);
/// After positions of a prompt were computed.
void set_position(const DeviceSlots& slots, std::uint32_t slot, std::int64_t position, std::int64_t rope_delta,
                  cudaStream_t stream);
/// State, flags and forced tokens, and KV of positions [0, length), change places.
void exchange_slots(const DeviceSlots& slots, const DeviceKv& kv, std::uint32_t a, std::uint32_t b,
                    std::uint32_t length, cudaStream_t stream);
void copy_kv(const DeviceKv& kv, std::uint32_t from, std::uint32_t to, std::uint32_t length, cudaStream_t stream);
void clear_kv(const DeviceKv& kv, std::uint32_t slot, std::uint32_t first, std::uint32_t end, cudaStream_t stream);

}  // namespace bulkhead::worker::cuda

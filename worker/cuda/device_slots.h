#pragma once

/// What the kernels of generation work on. Nothing of CUDA's, so that the sampler's kernel runs on host threads as well.

#include "worker/generation/sampler_core.h"

namespace bulkhead::worker::cuda {

using generation::Drawn;
using generation::DrawRules;
using generation::SlotState;
using Wide = unsigned long long;  ///< what CUDA's 64-bit intrinsics take

/// What one slot gave in one step, in pinned host memory that the GPU writes to.
struct GivenStep {
    std::int32_t tokens[generation::limits::codebooks_max];
    std::uint32_t stop;
    std::uint32_t not_finite;
};

/// Launches whose results may wait to be collected, and one that is being written.
inline constexpr std::uint32_t given_turns = 4;

inline constexpr std::uint32_t row_blocks_max = 8;  ///< what every GPU with clusters can hold of one

/// How many blocks draw from one row of logits: one for each 16,384 tokens, in a power of two. A block reads these three
/// times, 9 + 4 + 4 bytes a token; more blocks would wait for each other as long as they would save.
constexpr std::uint32_t row_blocks(std::uint32_t vocabulary) {
    std::uint32_t blocks = 1;
    while (blocks < row_blocks_max && vocabulary > blocks * 16'384) blocks *= 2;
    return blocks;
}

/// What the blocks of one row share. Three histograms take turns: one is added to, one is read, one is emptied.
struct RowScratch {
    Wide weight[3][generation::draw::bins];
    Wide part[2][row_blocks_max];  ///< of a maximum: each block's own; two take turns
    generation::draw::Candidate list[generation::draw::list_max];
    std::uint32_t listed;
    std::uint32_t drawn;  ///< by the block that had the list
};

/// Device memory of all sequences, at addresses that never change. Sizes: S slots, C codebooks, V vocabulary.
struct DeviceSlots {
    SlotState* states;       ///< [S]
    std::uint8_t* flags;     ///< [S, C, V]
    std::int32_t* forced;    ///< [S, forced_steps_max, C]
    float* adjusted;         ///< [S, C, V], scratch of the sampler
    RowScratch* rows;        ///< [S, C]; null where `row_blocks` is 1
    Drawn* drawn;            ///< [S, C]
    std::int64_t* tokens;    ///< [S, C], decode's first argument
    std::int64_t* positions; ///< [S]
    std::int64_t* deltas;    ///< [S]
    std::uint32_t* turn;     ///< steps since the load
    std::uint32_t* active;   ///< slots that the next draws are for; further rows of a captured step only ride along
    GivenStep* given;        ///< [given_turns, S], on the host
    std::uint32_t slots;
    std::uint32_t length;
    std::uint32_t row_blocks;  ///< that draw from one row: a cluster, or 1
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

}  // namespace bulkhead::worker::cuda

#pragma once

/// The data of the generation kernels, without CUDA types: the sampler's kernel also runs on host
/// threads.

#include "worker/generation/sampler_core.h"

namespace bulkhead::worker::cuda {

using generation::Drawn;
using generation::DrawRules;
using generation::SlotState;
using Wide = unsigned long long;  ///< the operand type of CUDA's 64-bit intrinsics

/// The result of one slot's step, in pinned host memory that the GPU writes.
struct GivenStep {
    std::int32_t tokens[generation::limits::codebooks_max];
    std::uint32_t stop;
    std::uint32_t not_finite;
};

/// Launches whose results may be uncollected, plus one being written.
inline constexpr std::uint32_t given_turns = 4;

inline constexpr std::uint32_t row_blocks_max = 8;  ///< blocks of one cluster that every GPU with
                                                    ///< clusters can hold

/// Returns how many blocks draw from one row of logits: one per 16,384 tokens, rounded to a power
/// of two. A block reads these three times, 9 + 4 + 4 bytes a token; more blocks would lose in
/// waiting what they save.
constexpr std::uint32_t row_blocks(std::uint32_t vocabulary) {
    std::uint32_t blocks = 1;
    while (blocks < row_blocks_max && vocabulary > blocks * 16'384) blocks *= 2;
    return blocks;
}

/// What the blocks of one row share. Three histograms rotate: one is added to, one is read,
/// one is cleared.
struct RowScratch {
    Wide weight[3][generation::draw::bins];
    Wide part[2][row_blocks_max];  ///< each block's part of a maximum; two buffers alternate
    generation::draw::Candidate list[generation::draw::list_max];
    std::uint32_t listed;
    std::uint32_t drawn;  ///< set by the block that holds the list
};

/// Device memory of all sequences, at fixed addresses. Sizes: S slots, C codebooks, V vocabulary.
struct DeviceSlots {
    SlotState* states;       ///< [S]
    std::uint8_t* flags;     ///< [S, C, V]
    std::int32_t* forced;    ///< [S, forced_steps_max, C]
    float* adjusted;         ///< [S, C, V], scratch of the sampler
    RowScratch* rows;        ///< [S, C]; null if `row_blocks` is 1
    Drawn* drawn;            ///< [S, C]
    std::int64_t* tokens;    ///< [S, C], decode's first argument
    std::int64_t* positions; ///< [S]
    std::int64_t* deltas;    ///< [S]
    std::uint32_t* turn;     ///< number of steps since the load
    std::uint32_t* active;   ///< slots to draw for; further rows of a captured step are ignored
    GivenStep* given;        ///< [given_turns, S], on the host
    std::uint32_t slots;
    std::uint32_t length;
    std::uint32_t row_blocks;  ///< blocks that draw from one row: a cluster, or 1
    DrawRules rules;
};

/// The KV: `count` device pointers in device memory, each to [S, rows * heads, length,
/// position_bytes].
struct DeviceKv {
    void* const* buffers;
    std::uint32_t count;           ///< K and V of each layer
    std::uint32_t heads;           ///< rows * heads
    std::uint32_t length;          ///< positions
    std::uint32_t position_bytes;  ///< of one head; a multiple of 2
};

}  // namespace bulkhead::worker::cuda

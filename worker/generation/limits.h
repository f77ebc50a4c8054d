#pragma once

/// Bounds of generation packages and of what the engine holds for each sequence.

#include <cstdint>

namespace bulkhead::worker::generation::limits {

inline constexpr std::uint64_t manifest_bytes_max = 4ULL << 20;
/// As the safetensors format itself says.
inline constexpr std::uint64_t weights_header_bytes_max = 100ULL << 20;
inline constexpr std::uint64_t weight_tensors_max = 1U << 20;
inline constexpr std::uint32_t codebooks_max = 16;
inline constexpr std::uint32_t ras_window_max = 16;  ///< frames that repetition-aware
                                                     ///< sampling looks back on
inline constexpr std::uint32_t vocabulary_max = 1U << 20;
inline constexpr std::uint32_t length_max = 1U << 20;
inline constexpr std::uint32_t slots_max = 64;
inline constexpr std::uint32_t layers_max = 1024;
inline constexpr std::uint32_t width_max = 1U << 20;
inline constexpr std::uint32_t forced_steps_max = 4096;  ///< of one request

}  // namespace bulkhead::worker::generation::limits

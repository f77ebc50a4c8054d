#pragma once

/// Bounds of generation requests, and of what is sent back while they run.

#include <chrono>
#include <cstddef>
#include <cstdint>

namespace bulkhead::worker::generation::limits {

/// A client that takes no part of its stream for this long loses the sequence.
inline constexpr std::chrono::seconds unread_stream{10};
/// Token ids in one part of a stream: keeps its JSON far below `wire::json_bytes_max`.
inline constexpr std::size_t part_tokens_max = 2048;

/// Token ids in each of `stop`, `stop_also` and `banned`.
inline constexpr std::size_t rule_tokens_max = 1024;
inline constexpr double temperature_max = 100;
/// Keeps a logit divided or multiplied by it finite.
inline constexpr double repetition_penalty_min = 0.01;
inline constexpr double repetition_penalty_max = 100;
inline constexpr double guidance_max = 100;

/// A prefix that another slot still needs is copied if that saves the prefill of at least this
/// many positions.
inline constexpr std::uint32_t copied_prefix_min = 16;

}  // namespace bulkhead::worker::generation::limits

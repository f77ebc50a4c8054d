#pragma once

/// Every bound of a fleet file, in one place. `fleet.schema.json` repeats those that a schema can express, and
/// a test holds the two together.

#include <chrono>
#include <cstddef>
#include <cstdint>

namespace bulkhead::config::limits {

// What may be parsed at all: a fleet file is small, and these keep a hostile one from costing memory or stack.
inline constexpr std::size_t file_bytes_max = 1u << 20;
inline constexpr std::size_t nesting_max = 32;
inline constexpr std::size_t nodes_max = 10'000;  ///< with every alias expanded
inline constexpr std::size_t diagnostics_max = 200;

inline constexpr std::int64_t replicas_max = 8;
inline constexpr std::int64_t workers_max = 256;  ///< all replicas together: what the keeper's table holds
inline constexpr std::int64_t threads_max = 256;
inline constexpr std::int64_t queue_max = 4096;
inline constexpr std::int64_t channels_max = 1024;
inline constexpr std::size_t methods_max = 32;
inline constexpr std::size_t parameters_max = 32;
inline constexpr std::size_t buckets_max = 64;
inline constexpr std::int64_t slots_max = 64;            ///< sequences of a generating model at once
inline constexpr std::int64_t length_max = 1 << 20;      ///< positions of one
inline constexpr std::int64_t prefill_chunk_max = 8192;  ///< positions of a prompt computed at once
inline constexpr std::size_t name_bytes_max = 63;         ///< of a model or a method
inline constexpr std::size_t tensor_name_bytes_max = 55;  ///< also of a parameter
inline constexpr std::size_t dim_name_bytes_max = 32;
inline constexpr std::int64_t dim_max = std::int64_t{1} << 40;
inline constexpr std::chrono::milliseconds duration_max = std::chrono::hours{24};
inline constexpr std::uint64_t slab_bytes_min = 4096;
inline constexpr std::uint64_t slab_bytes_max = std::uint64_t{64} << 30;
inline constexpr std::uint64_t core_bytes_max = std::uint64_t{1} << 40;
/// argv and environment of a worker share one packet of 56 KiB on the keeper's link.
inline constexpr std::size_t environment_bytes_max = 32 * 1024;

}  // namespace bulkhead::config::limits

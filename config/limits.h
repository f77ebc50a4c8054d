#pragma once

/// Bounds of a fleet file that belong to no single key; fleet.schema.json has those of the keys. If
/// the schema repeats a bound, a test compares the two.

#include <chrono>
#include <cstddef>
#include <cstdint>

namespace bulkhead::config::limits {

// Bounds of the parser: a fleet file is small, and a hostile one must not cost memory or stack.
inline constexpr std::size_t file_bytes_max = 1u << 20;
inline constexpr std::size_t nesting_max = 32;
inline constexpr std::size_t nodes_max = 10'000;  ///< with every alias expanded
inline constexpr std::size_t diagnostics_max = 200;

inline constexpr std::int64_t workers_max = 256;  ///< all replicas together: the size of the
                                                  ///< keeper's table
inline constexpr std::size_t blanks_max = 16;  ///< of all kinds; they take places of replicas
inline constexpr std::uint64_t memory_bytes_max = std::uint64_t{1} << 40;  ///< of one device
inline constexpr std::size_t methods_max = 32;
inline constexpr std::size_t parameters_max = 32;
inline constexpr std::size_t buckets_max = 64;
inline constexpr std::size_t name_bytes_max = 63;         ///< of a model or a method
inline constexpr std::size_t tensor_name_bytes_max = 55;  ///< also of a parameter
inline constexpr std::size_t dim_name_bytes_max = 32;
inline constexpr std::int64_t dim_max = std::int64_t{1} << 40;
inline constexpr std::chrono::milliseconds duration_max = std::chrono::hours{24};
/// argv and environment of a worker share one packet of 56 KiB on the keeper's link.
inline constexpr std::size_t environment_bytes_max = 32 * 1024;
/// As JSON, so that the whole declaration fits a packet of the worker link.
inline constexpr std::size_t options_bytes_max = 16 * 1024;

}  // namespace bulkhead::config::limits

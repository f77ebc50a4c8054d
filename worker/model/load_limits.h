#pragma once

#include <cstddef>
#include <cstdint>

/// Bounds of loading a model. The supervisor bounds a load's duration: `Deadlines::load`.
namespace bulkhead::worker::limits {

/// Unused entries are evicted beyond it.
inline constexpr std::uint64_t package_cache_bytes_max = 8ULL << 30;
/// Of one package: against zip bombs.
inline constexpr std::uint64_t package_unpacked_bytes_max = 64ULL << 30;
inline constexpr std::size_t package_files_max = 4096;
inline constexpr std::size_t package_path_bytes_max = 512;
/// Of a manifest or metadata file.
inline constexpr std::uint64_t package_text_bytes_max = 1ULL << 20;
inline constexpr std::size_t io_chunk_bytes = 1ULL << 20;
inline constexpr std::size_t known_hashes_max = 1024;     ///< of files that are hashed
                                                          ///< but not unpacked
inline constexpr int cache_entry_tries = 8;               ///< for an entry evicted between
                                                          ///< lookup and lock
inline constexpr std::size_t model_words_max = 2000;      ///< of an exception's text in an error
inline constexpr std::size_t heard_bytes_max = 16 << 10;  ///< of a compiled model's
                                                          ///< std::cerr output
inline constexpr int warmup_runs = 2;  ///< TorchScript profiles the first run and
                                       ///< compiles in the second

}  // namespace bulkhead::worker::limits

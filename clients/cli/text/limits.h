#pragma once

/// Every wait of the command line ends at one of these, every size is bounded by one.

#include <chrono>
#include <cstddef>
#include <cstdint>

namespace bulkhead::cli::limits {

using namespace std::chrono_literals;

inline constexpr std::chrono::milliseconds answer = 10s;  ///< of a question that the daemon answers from memory
/// To subscribe again after a supervisor's death: the library itself gives up after 30 s without any that answers.
inline constexpr std::chrono::milliseconds renewal = 40s;
inline constexpr std::chrono::milliseconds start = 30s;         ///< of `up`, until the daemon answers
inline constexpr std::chrono::milliseconds start_probe = 20ms;  ///< between two tries to connect
inline constexpr std::chrono::milliseconds start_loser = 5s;    ///< for our daemon to end when another one answers
inline constexpr std::chrono::milliseconds keeper_end = 60s;    ///< of `down`, after the last receipt
inline constexpr std::chrono::milliseconds watch = 1s;          ///< of `ps --watch`, between two pictures at the latest

inline constexpr std::chrono::milliseconds adoption = 60s;  ///< of `upgrade`, until no worker is being adopted
inline constexpr int log_lines_max = 2000;                  ///< that the daemon keeps of one model
inline constexpr int crashes_shown = 20;                    ///< of `crashes` without --limit
inline constexpr std::size_t start_message_bytes = 4096;    ///< of what a daemon said before it died
inline constexpr std::int64_t repeats_max = 10'000'000;
inline constexpr std::size_t npy_header_bytes_max = 64 * 1024;  ///< numpy's own are below 1 KiB
inline constexpr std::size_t shown_text_bytes_max = 16 * 1024;  ///< of one text that a peer gave

}  // namespace bulkhead::cli::limits

#pragma once

/// Bounds of the command line's waits and sizes.

#include <chrono>
#include <cstddef>
#include <cstdint>

namespace bulkhead::cli::limits {

using namespace std::chrono_literals;

inline constexpr std::chrono::milliseconds answer = 10s;  ///< for a question that the daemon
                                                          ///< answers from memory
/// Subscribing again after a supervisor's death: the library gives up after 30 s
/// without a supervisor.
inline constexpr std::chrono::milliseconds renewal = 40s;
/// For `up`, until the daemon answers.
inline constexpr std::chrono::milliseconds start = 30s;
inline constexpr std::chrono::milliseconds start_probe = 20ms;  ///< between two attempts to connect
/// For our daemon to end after another one answered.
inline constexpr std::chrono::milliseconds start_loser = 5s;
/// For `down`, after the last receipt.
inline constexpr std::chrono::milliseconds keeper_end = 60s;
/// For `ps --watch`, longest pause between pictures.
inline constexpr std::chrono::milliseconds watch = 1s;

inline constexpr std::chrono::milliseconds adoption = 60s;  ///< for `upgrade`, until no worker
                                                            ///< is being adopted
inline constexpr int log_lines_max = 2000;                  ///< lines that the daemon
                                                            ///< keeps per model
inline constexpr int crashes_shown = 20;                    ///< by `crashes` without --limit
inline constexpr std::size_t start_message_bytes = 4096;    ///< of the output of a daemon that died
inline constexpr std::int64_t repeats_max = 10'000'000;
inline constexpr std::size_t npy_header_bytes_max = 64 * 1024;  ///< numpy's own are below 1 KiB
inline constexpr std::size_t findings_quoted = 8;               ///< of the doctor's, by `why`
inline constexpr std::size_t quoted_characters_max = 300;       ///< of a finding's reason or remedy
inline constexpr int doctor_nice = 10;                          ///< of the doctor that `why` runs
inline constexpr std::size_t shown_text_bytes_max = 16 * 1024;  ///< of one text from a peer

}  // namespace bulkhead::cli::limits

#pragma once

/// One page of a worker's memory that the supervisor maps read-only. Shows whether the worker is dead and
/// what it was doing, even when it does not answer. A sealed memfd of `page_bytes`, made by the worker,
/// sent with its first hello. The reader must not trust any member: the worker may write it at any time.

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace bulkhead::worker_page {

inline constexpr std::size_t page_bytes = 4096;
inline constexpr std::uint32_t magic = 0x47504b42;  ///< "BKPG"

/// The running request in words: "forward(input_ids int64[1,16], attention_mask int64[1,16])",
/// "reset_states()", "warming forward". Never contains tensor contents.
inline constexpr std::size_t request_text_bytes = 1024;

struct Page {
    /// A robust, process-shared pthread mutex. The worker's main thread locks it for life and sets
    /// FUTEX_WAITERS in it. Its first four bytes are the futex word: when that thread ends, the
    /// kernel sets FUTEX_OWNER_DIED and wakes waiters, before it frees the process' memory.
    alignas(64) std::array<std::byte, 64> alive;

    std::uint32_t magic_number;  ///< `magic`; 0 until the mutex is locked
    std::uint32_t reserved;
    /// Rises with every finished inference, and every step of a long one or of a load. Hang
    /// detection watches it.
    std::atomic<std::uint64_t> steps;
    /// CLOCK_MONOTONIC at the start of the running request; 0: nothing runs.
    std::atomic<std::uint64_t> running_since_ns;
    /// Odd while `request` is written.
    std::atomic<std::uint32_t> request_sequence;
    std::array<char, request_text_bytes> request;  ///< zero-terminated; the running or last request
};

static_assert(sizeof(Page) <= page_bytes);
static_assert(std::atomic<std::uint64_t>::is_always_lock_free);

}  // namespace bulkhead::worker_page

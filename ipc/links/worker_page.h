#pragma once

/// The one page of a worker's memory that the supervisor maps, read-only: who is dead, and what it was doing, can be
/// seen in it while nobody answers. A sealed memfd of `page_bytes`, made by the worker, sent with its first hello.
/// The reader takes every member for what it is: written by somebody else, at any time.

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace bulkhead::worker_page {

inline constexpr std::size_t page_bytes = 4096;
inline constexpr std::uint32_t magic = 0x47504b42;  ///< "BKPG"

/// What runs, in words: "forward(input_ids int64[1,16], attention_mask int64[1,16])", "reset_states()", "warming
/// forward". Never a tensor's contents.
inline constexpr std::size_t request_text_bytes = 1024;

struct Page {
    /// A robust, process-shared pthread mutex, locked for life by the worker's main thread, which also sets
    /// FUTEX_WAITERS in it. Its first four bytes are the word: the kernel sets FUTEX_OWNER_DIED in it and wakes
    /// waiters when that thread ends, before it frees the process' memory.
    alignas(64) std::array<std::byte, 64> alive;

    std::uint32_t magic_number;  ///< `magic`; 0 until the word is held
    std::uint32_t reserved;
    /// Rises with every inference that ends, and with every step of a long one or of a load: who does not move is
    /// judged by it.
    std::atomic<std::uint64_t> steps;
    /// CLOCK_MONOTONIC of the start of what runs; 0: nothing runs.
    std::atomic<std::uint64_t> running_since_ns;
    /// Odd while `request` is being written.
    std::atomic<std::uint32_t> request_sequence;
    std::array<char, request_text_bytes> request;  ///< zero-terminated; of what runs, or ran last
};

static_assert(sizeof(Page) <= page_bytes);
static_assert(std::atomic<std::uint64_t>::is_always_lock_free);

}  // namespace bulkhead::worker_page

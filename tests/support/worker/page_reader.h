#pragma once

/// A worker's page as its supervisor sees it.

#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <ctime>

#include <gtest/gtest.h>

#include "ipc/links/worker_page.h"

namespace bulkhead::worker::test {

/// Every member as it is now: plain values.
struct SeenPage {
    std::uint32_t magic_number;
    std::uint64_t steps;
    std::uint64_t running_since_ns;
    std::uint32_t request_sequence;
    std::array<char, worker_page::request_text_bytes> request;
};

/// A read-only mapping.
class PageReader {
public:
    explicit PageReader(int memfd)
        : memory_{::mmap(nullptr, worker_page::page_bytes, PROT_READ, MAP_SHARED, memfd, 0)} {
        EXPECT_NE(memory_, MAP_FAILED);
    }
    ~PageReader() { ::munmap(memory_, worker_page::page_bytes); }
    PageReader(const PageReader&) = delete;
    PageReader& operator=(const PageReader&) = delete;

    [[nodiscard]] SeenPage read() const {
        const auto& page = *static_cast<const worker_page::Page*>(memory_);
        return {page.magic_number, page.steps, page.running_since_ns, page.request_sequence, page.request};
    }
    [[nodiscard]] std::uint32_t word() const {
        return __atomic_load_n(static_cast<const std::uint32_t*>(memory_), __ATOMIC_ACQUIRE);
    }
    /// Waits as the supervisor does; false when nothing came in that time.
    [[nodiscard]] bool await_death(std::chrono::seconds longest) const {
        timespec until{};
        ::clock_gettime(CLOCK_MONOTONIC, &until);
        until.tv_sec += longest.count();
        for (std::uint32_t seen = word(); (seen & FUTEX_OWNER_DIED) == 0; seen = word()) {
            futex_waitv waited{
                .val = seen, .uaddr = reinterpret_cast<std::uint64_t>(memory_), .flags = FUTEX_32, .__reserved = 0};
            if (::syscall(SYS_futex_waitv, &waited, 1, 0, &until, CLOCK_MONOTONIC) < 0 && errno == ETIMEDOUT)
                return false;
        }
        return true;
    }

private:
    void* memory_;
};

inline SeenPage page_seen(int memfd) { return PageReader{memfd}.read(); }

}  // namespace bulkhead::worker::test

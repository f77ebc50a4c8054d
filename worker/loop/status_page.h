#pragma once

#include <pthread.h>

#include <charconv>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

#include "ipc/base/error.h"
#include "ipc/base/mapping.h"
#include "ipc/base/unique_fd.h"
#include "ipc/links/worker_page.h"
#include "worker/loop/alarm.h"

namespace bulkhead::worker {

/// Writes words into a bounded, zero-terminated buffer; drops what does not fit. Allocates nothing.
class BoundedText {
public:
    explicit BoundedText(std::span<char> room) noexcept : next_{room.data()}, end_{room.data() + room.size() - 1} {}
    ~BoundedText() { *next_ = '\0'; }
    BoundedText(const BoundedText&) = delete;
    BoundedText& operator=(const BoundedText&) = delete;

    BoundedText& operator<<(std::string_view words) noexcept {
        next_ += words.copy(next_, static_cast<std::size_t>(end_ - next_));
        return *this;
    }
    BoundedText& operator<<(std::int64_t number) noexcept {
        if (const auto [after, failed] = std::to_chars(next_, end_, number); failed == std::errc{}) next_ = after;
        return *this;
    }

private:
    char* next_;
    char* end_;
};

/// A page that says that this worker lives and what it does. The supervisor can read it while the worker answers
/// nobody.
///
/// Owns    the memfd, the mapping, and the robust mutex in it: the thread that calls `make` holds the mutex, and must
///         run the destructor, too. A worker never runs it: the kernel releases the mutex when the thread ends
/// Thread  `begin`, `step` and `end` on one thread at a time, the executor; they allocate nothing and make no
///         system call
class StatusPage {
public:
    /// Errors  those of memfd_create, mmap and the mutex: a worker goes on without a page
    static Result<std::unique_ptr<StatusPage>> make();
    ~StatusPage();
    StatusPage(const StatusPage&) = delete;
    StatusPage& operator=(const StatusPage&) = delete;

    /// To be sent with each hello. Sealed against change of size and against any further writable mapping.
    [[nodiscard]] int fd() const noexcept { return memfd_.get(); }

    /// Something runs since `started`; `describe` writes it in words into a BoundedText.
    template <typename Describe>
    void begin(Clock::time_point started, const Describe& describe) noexcept {
        tell(describe);
        page_.running_since_ns.store(static_cast<std::uint64_t>(started.time_since_epoch().count()),
                                     std::memory_order_release);
    }
    /// What runs has made a step, which `describe` names.
    template <typename Describe>
    void step(const Describe& describe) noexcept {
        tell(describe);
        page_.steps.fetch_add(1, std::memory_order_release);
    }
    /// It is done.
    void end() noexcept {
        page_.steps.fetch_add(1, std::memory_order_release);
        page_.running_since_ns.store(0, std::memory_order_release);
    }

private:
    StatusPage(UniqueFd memfd, Mapping mapping);
    Result<> hold_word();

    template <typename Describe>
    void tell(const Describe& describe) noexcept {
        const std::uint32_t sequence = page_.request_sequence.load(std::memory_order_relaxed);
        page_.request_sequence.store(sequence + 1, std::memory_order_relaxed);
        std::atomic_thread_fence(std::memory_order_release);
        {
            BoundedText text{page_.request};
            describe(text);
        }
        page_.request_sequence.store(sequence + 2, std::memory_order_release);
    }

    UniqueFd memfd_;
    Mapping mapping_;
    worker_page::Page& page_;
};

/// While this lives, the page says that something runs. `page` may be null.
class RunningMark {
public:
    template <typename Describe>
    RunningMark(StatusPage* page, Clock::time_point started, const Describe& describe) noexcept : page_{page} {
        if (page_ != nullptr) page_->begin(started, describe);
    }
    ~RunningMark() {
        if (page_ != nullptr) page_->end();
    }
    RunningMark(const RunningMark&) = delete;
    RunningMark& operator=(const RunningMark&) = delete;

private:
    StatusPage* page_;
};

}  // namespace bulkhead::worker

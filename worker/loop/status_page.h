#pragma once

#include <pthread.h>

#include <cstdint>
#include <memory>
#include <string_view>

#include "ipc/base/error.h"
#include "ipc/base/mapping.h"
#include "ipc/base/unique_fd.h"
#include "ipc/links/worker_page.h"
#include "worker/loop/alarm.h"

namespace bulkhead::worker {

/// A page that says that this worker lives and what it does. The supervisor can read it while the worker answers
/// nobody.
///
/// Owns    the memfd, the mapping, and the robust mutex in it: the thread that calls `make` holds the mutex, and must
///         run the destructor, too. A worker never runs it: the kernel releases the mutex when the thread ends
/// Thread  `begin`, `step` and `end` on one thread at a time, the executor; they make no system call
class StatusPage {
public:
    /// Errors  those of memfd_create, mmap and the mutex: a worker goes on without a page
    static Result<std::unique_ptr<StatusPage>> make();
    ~StatusPage();
    StatusPage(const StatusPage&) = delete;
    StatusPage& operator=(const StatusPage&) = delete;

    /// To be sent with each hello. Sealed against change of size and against any further writable mapping.
    [[nodiscard]] int fd() const noexcept { return memfd_.get(); }

    /// Something runs since `started`; `what` says it in words, which are cut to fit.
    void begin(Clock::time_point started, std::string_view what) noexcept;
    /// What runs has made a step, which `what` names.
    void step(std::string_view what) noexcept;
    /// It is done.
    void end() noexcept {
        page_.steps.fetch_add(1, std::memory_order_release);
        page_.running_since_ns.store(0, std::memory_order_release);
    }

private:
    StatusPage(UniqueFd memfd, Mapping mapping);
    Result<> hold_word();

    void tell(std::string_view what) noexcept;

    UniqueFd memfd_;
    Mapping mapping_;
    worker_page::Page& page_;
};

/// While this lives, the page says that something runs. `page` may be null.
class RunningMark {
public:
    RunningMark(StatusPage* page, Clock::time_point started, std::string_view what) noexcept : page_{page} {
        if (page_ != nullptr) page_->begin(started, what);
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

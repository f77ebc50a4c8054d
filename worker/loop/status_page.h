#pragma once

#include <memory>
#include <string_view>

#include "ipc/base/error.h"
#include "ipc/base/mapping.h"
#include "ipc/base/unique_fd.h"
#include "ipc/links/worker_page.h"
#include "worker/loop/alarm.h"

namespace bulkhead::worker {

/// A page that shows that this worker lives and what it does. The supervisor can read it even while
/// the worker answers no messages.
///
/// Owns    the memfd, the mapping, and the robust mutex in it. The thread that calls `make` holds
///         the mutex and must also run the destructor. A worker never runs it: the kernel releases
///         the mutex when the thread ends
class StatusPage {
public:
    /// Errors  those of memfd_create, mmap and the mutex: a worker then runs without a page
    static Result<std::unique_ptr<StatusPage>> make();
    ~StatusPage();
    StatusPage(const StatusPage&) = delete;
    StatusPage& operator=(const StatusPage&) = delete;

    /// Sent with each hello. Sealed against resizing and further writable mappings.
    [[nodiscard]] int fd() const noexcept { return memfd_.get(); }

    /// Something has run since `started`; `what` describes it, truncated to fit.
    void begin(Clock::time_point started, std::string_view what) noexcept;
    /// The running work has reached a new step, which `what` names.
    void step(std::string_view what) noexcept;
    /// The work is done.
    void end() noexcept {
        page_.steps.fetch_add(1, std::memory_order_release);
        page_.running_since_ns.store(0, std::memory_order_release);
    }

private:
    StatusPage(UniqueFd memfd, Mapping mapping);
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

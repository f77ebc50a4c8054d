#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include <boost/asio/io_context.hpp>

#include "ipc/error.h"
#include "ipc/unique_fd.h"
#include "ipc/worker_page.h"

namespace bulkhead::supervisor {

/// A worker's page, mapped read-only.
/// Owns  the mapping, whatever becomes of the worker
class WorkerPageView {
public:
    /// Checks seals, size and magic before it maps. Errors  protocol_violation, resources_exhausted
    static Result<std::shared_ptr<const WorkerPageView>> map(const UniqueFd& memfd);
    ~WorkerPageView();
    WorkerPageView(const WorkerPageView&) = delete;
    WorkerPageView& operator=(const WorkerPageView&) = delete;

    [[nodiscard]] std::uint64_t steps() const noexcept;
    /// CLOCK_MONOTONIC; 0: nothing runs.
    [[nodiscard]] std::uint64_t running_since_ns() const noexcept;
    /// Of what runs, or ran last; escaped and bounded. Empty when it was caught in the middle of writing.
    [[nodiscard]] std::string request() const;
    [[nodiscard]] bool owner_died() const noexcept;
    [[nodiscard]] const void* word() const noexcept { return page_; }

private:
    explicit WorkerPageView(const worker_page::Page* page) noexcept : page_{page} {}
    const worker_page::Page* page_;
};

/// Notices the end of a worker's main thread before the kernel frees the process' memory and closes its sockets:
/// threads that sleep in futex_waitv() on the alive words, 127 each. Costs nothing while nobody dies.
///
/// Thread  the loop; `died` is called there, once, unless the watch was dropped before
class AliveWatch {
public:
    explicit AliveWatch(boost::asio::io_context& io);
    ~AliveWatch();
    AliveWatch(const AliveWatch&) = delete;
    AliveWatch& operator=(const AliveWatch&) = delete;

    /// Dropping it ends the watch.
    class Watch;
    [[nodiscard]] std::shared_ptr<Watch> watch(std::shared_ptr<const WorkerPageView> page, std::function<void()> died);

    /// False where the kernel has no futex_waitv() (before 5.16): death is then seen at the end of the link.
    [[nodiscard]] static bool is_supported();

private:
    struct State;
    std::shared_ptr<State> state_;
};

}  // namespace bulkhead::supervisor

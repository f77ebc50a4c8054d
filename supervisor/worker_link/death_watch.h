#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include <boost/asio/io_context.hpp>

#include "ipc/base/error.h"
#include "ipc/base/mapping.h"
#include "ipc/base/unique_fd.h"
#include "ipc/links/worker_page.h"

namespace bulkhead::supervisor {

/// A worker's page, mapped read-only.
/// Owns  the mapping, even after the worker ends
class WorkerPageView {
public:
    /// Checks size, seals, magic number, and that the futex word will wake its waiters.
    /// Errors  protocol_violation, resources_exhausted
    static Result<std::shared_ptr<const WorkerPageView>> map(const UniqueFd& memfd);

    [[nodiscard]] std::uint64_t steps() const noexcept;
    /// CLOCK_MONOTONIC, not in the future; 0: nothing runs.
    [[nodiscard]] std::uint64_t running_since_ns() const noexcept;
    /// The request that runs or ran last; escaped and bounded. Empty if read in the
    /// middle of a write.
    [[nodiscard]] std::string request() const;
    /// The futex word: owner, FUTEX_WAITERS, and FUTEX_OWNER_DIED once the kernel has seen
    /// that thread end.
    [[nodiscard]] std::uint32_t word() const noexcept;
    [[nodiscard]] const void* word_address() const noexcept { return page_; }
    [[nodiscard]] bool owner_died() const noexcept;

private:
    explicit WorkerPageView(Mapping mapping) noexcept
        : mapping_{std::move(mapping)}, page_{reinterpret_cast<const worker_page::Page*>(mapping_.bytes().data())} {}
    Mapping mapping_;
    const worker_page::Page* page_;
};

/// Notices the end of a worker's main thread before the kernel frees the process' memory and closes
/// its sockets. Threads sleep in futex_waitv() on the alive words, 127 each. Costs nothing while
/// all workers live: no thread before the first watch, no wake-up before a death.
///
/// Thread  the loop: `died` runs there, once, after `watch` has returned, unless the watch was
///         dropped before
class DeathWatch {
public:
    explicit DeathWatch(boost::asio::io_context& io);
    ~DeathWatch();
    DeathWatch(const DeathWatch&) = delete;
    DeathWatch& operator=(const DeathWatch&) = delete;

    /// Destroying it ends the watch.
    struct Watch;
    /// Stops watching a word that changes in any way but its owner's death, or wakes
    /// repeatedly without a change: such a worker cannot be trusted. The end of its link still
    /// reports its death.
    [[nodiscard]] std::shared_ptr<Watch> watch(std::shared_ptr<const WorkerPageView> page, std::function<void()> died);

    /// Returns false without futex_waitv(): before Linux 5.16, or under a seccomp filter that does
    /// not know it. Deaths are then seen only at the end of the link; `died` is never called.
    [[nodiscard]] static bool is_supported();

private:
    struct State;
    std::shared_ptr<State> state_;
};

}  // namespace bulkhead::supervisor

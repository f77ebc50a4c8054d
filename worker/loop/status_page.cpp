#include "worker/loop/status_page.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <new>

namespace bulkhead::worker {
namespace {

using worker_page::Page;

static_assert(sizeof(pthread_mutex_t) <= sizeof(Page::alive));
static_assert(offsetof(pthread_mutex_t, __data.__lock) == 0, "the word is the mutex' first member");
// The page's times are CLOCK_MONOTONIC in nanoseconds.
static_assert(std::is_same_v<Clock::duration, std::chrono::nanoseconds>);

pthread_mutex_t* mutex_of(Page& page) noexcept { return reinterpret_cast<pthread_mutex_t*>(page.alive.data()); }

}  // namespace

Result<std::unique_ptr<StatusPage>> StatusPage::make() {
    constexpr std::string_view attempt = "making the worker's page";
    UniqueFd memfd{::memfd_create("bulkhead:page", MFD_CLOEXEC | MFD_ALLOW_SEALING)};
    if (!memfd || ::ftruncate(memfd.get(), worker_page::page_bytes) != 0) return system_error(attempt, errno);
    Mapping mapping{worker_page::page_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, memfd.get()};
    if (!mapping) return system_error(attempt, errno);
    const std::span<std::byte> memory = mapping.bytes();
    std::unique_ptr<StatusPage> made{new StatusPage{std::move(memfd), std::move(mapping)}};
    // Sealed after the mapping above, which stays writable. A child of the model does not
    // inherit the page.
    constexpr int seals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_FUTURE_WRITE | F_SEAL_SEAL;
    if (::fcntl(made->fd(), F_ADD_SEALS, seals) != 0 || ::madvise(memory.data(), memory.size(), MADV_DONTFORK) != 0)
        return system_error(attempt, errno);
    pthread_mutexattr_t kind;
    ::pthread_mutexattr_init(&kind);
    ::pthread_mutexattr_setpshared(&kind, PTHREAD_PROCESS_SHARED);
    ::pthread_mutexattr_setrobust(&kind, PTHREAD_MUTEX_ROBUST);
    Page& page = made->page_;
    int failed = ::pthread_mutex_init(mutex_of(page), &kind);
    ::pthread_mutexattr_destroy(&kind);
    if (failed == 0) failed = ::pthread_mutex_lock(mutex_of(page));
    if (failed != 0) return system_error("holding the word in the worker's page", failed);
    // The kernel wakes waiters only if this bit is set. They cannot set it: they map the
    // page read-only.
    std::atomic_ref{*reinterpret_cast<std::uint32_t*>(page.alive.data())}.fetch_or(FUTEX_WAITERS);
    std::atomic_ref{page.magic_number}.store(worker_page::magic, std::memory_order_release);
    return made;
}

StatusPage::StatusPage(UniqueFd memfd, Mapping mapping)
    : memfd_{std::move(memfd)}, mapping_{std::move(mapping)}, page_{*new (mapping_.bytes().data()) Page{}} {}

void StatusPage::begin(Clock::time_point started, std::string_view what) noexcept {
    tell(what);
    page_.running_since_ns.store(static_cast<std::uint64_t>(started.time_since_epoch().count()),
                                 std::memory_order_release);
}

void StatusPage::step(std::string_view what) noexcept {
    tell(what);
    page_.steps.fetch_add(1, std::memory_order_release);
}

void StatusPage::tell(std::string_view what) noexcept {
    const std::uint32_t sequence = page_.request_sequence.load(std::memory_order_relaxed);
    page_.request_sequence.store(sequence + 1, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_release);
    page_.request[what.copy(page_.request.data(), page_.request.size() - 1)] = '\0';
    page_.request_sequence.store(sequence + 2, std::memory_order_release);
}

StatusPage::~StatusPage() {
    if (page_.magic_number == worker_page::magic) ::pthread_mutex_unlock(mutex_of(page_));
}

}  // namespace bulkhead::worker

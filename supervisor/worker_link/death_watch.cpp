#include "supervisor/worker_link/death_watch.h"

#include <chrono>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include <boost/asio/post.hpp>
#include <spdlog/spdlog.h>

#include "supervisor/base/text.h"

namespace bulkhead::supervisor {
namespace {

constexpr std::size_t words_max = 127;  ///< per thread; the kernel takes 128, one of them is the
                                        ///< thread's own word
static_assert(words_max + 1 == FUTEX_WAITV_MAX);
/// Wake-ups with an unchanged word. The kernel wakes a word once, when its owner dies. More come
/// from a faulty worker and would keep this thread busy.
constexpr std::uint32_t empty_wakes_max = 8;

Error violation(std::string attempt) {
    return {ErrorCode::protocol_violation, "mapping a worker's page: " + std::move(attempt), "see docs/worker-link.md"};
}

long wake(std::atomic<std::uint32_t>& word) noexcept {
    return ::syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, 1, nullptr, nullptr, 0);
}

futex_waitv waiter(const void* word, std::uint32_t value, std::uint32_t flags) noexcept {
    futex_waitv result{};
    result.uaddr = reinterpret_cast<std::uintptr_t>(word);
    result.val = value;
    result.flags = FUTEX_32 | flags;
    return result;
}

}  // namespace

// --- the page

Result<std::shared_ptr<const WorkerPageView>> WorkerPageView::map(const UniqueFd& memfd) {
    struct stat status {};
    if (!memfd || ::fstat(memfd.get(), &status) != 0 || !S_ISREG(status.st_mode) ||
        status.st_size != static_cast<off_t>(worker_page::page_bytes))
        return violation("its descriptor is not a memfd of one page");
    // Without the seal, the owner could shrink it, and a read would raise SIGBUS.
    const int seals = ::fcntl(memfd.get(), F_GET_SEALS);
    if (seals < 0 || (seals & F_SEAL_SHRINK) == 0) return violation("it is not sealed against shrinking");
    Mapping mapping{worker_page::page_bytes, PROT_READ, MAP_SHARED, memfd.get()};
    if (!mapping) return system_error("mapping a worker's page", errno);
    std::shared_ptr<const WorkerPageView> view{new WorkerPageView{std::move(mapping)}};
    if (view->page_->magic_number != worker_page::magic) return violation("it has no magic number");
    if (!view->owner_died() && (view->word() & FUTEX_WAITERS) == 0)
        return violation("its word would wake nobody: FUTEX_WAITERS is not set");
    return view;
}

std::uint64_t WorkerPageView::steps() const noexcept { return page_->steps.load(std::memory_order_relaxed); }

std::uint64_t WorkerPageView::running_since_ns() const noexcept {
    const std::uint64_t since = page_->running_since_ns.load(std::memory_order_acquire);
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    return since <= static_cast<std::uint64_t>(std::chrono::nanoseconds{now}.count()) ? since : 0;
}

std::string WorkerPageView::request() const {
    std::array<char, worker_page::request_text_bytes> copy;
    const std::uint32_t before = page_->request_sequence.load(std::memory_order_acquire);
    std::memcpy(copy.data(), page_->request.data(), copy.size());
    std::atomic_thread_fence(std::memory_order_acquire);
    const std::uint32_t after = page_->request_sequence.load(std::memory_order_relaxed);
    if (before != after || before % 2 != 0) return {};
    return escaped({copy.data(), ::strnlen(copy.data(), copy.size())});
}

std::uint32_t WorkerPageView::word() const noexcept {
    return __atomic_load_n(reinterpret_cast<const std::uint32_t*>(page_->alive.data()), __ATOMIC_ACQUIRE);
}

bool WorkerPageView::owner_died() const noexcept { return (word() & FUTEX_OWNER_DIED) != 0; }

// --- the watch

/// One thread and the words it sleeps on.
struct WatchThread {
    struct Entry {
        std::shared_ptr<const WorkerPageView> page;  ///< keeps the mapping while the thread
                                                     ///< may sleep on it
        std::uint32_t alive_value = 0;
        std::uint32_t empty_wakes = 0;
        std::weak_ptr<DeathWatch::Watch> watch;
    };
    WatchThread(boost::asio::io_context& loop, std::mutex& shared) : io{loop}, mutex{shared} {}

    bool start();
    void work();
    /// Makes the thread read its list again.
    void nudge() noexcept {
        ++changes;
        wake(changes);
    }

    boost::asio::io_context& io;
    std::mutex& mutex;  ///< guards `entries` and `ending`
    std::vector<Entry> entries;
    bool ending = false;
    std::atomic<std::uint32_t> changes{0};  ///< the thread's own futex word
    std::thread thread;
};

struct DeathWatch::State {
    explicit State(boost::asio::io_context& loop) : io{loop} {}
    /// Returns a thread with room; null if none can be started.
    WatchThread* thread_with_room();

    boost::asio::io_context& io;
    std::mutex mutex;
    std::vector<std::unique_ptr<WatchThread>> threads;
};

struct DeathWatch::Watch {
    ~Watch() {
        const auto owner = state.lock();
        // It finds this watch expired, and releases the page.
        if (owner && thread != nullptr && died) thread->nudge();
    }

    static void tell_later(boost::asio::io_context& io, std::weak_ptr<Watch> watch) {
        boost::asio::post(io, [watch = std::move(watch)] {
            const auto one = watch.lock();
            if (const auto died = one ? std::exchange(one->died, nullptr) : nullptr) died();
        });
    }

    std::weak_ptr<State> state;  ///< expired: the threads have ended too
    std::function<void()> died;  ///< empty once called
    WatchThread* thread = nullptr;
};

bool WatchThread::start() {
    try {
        thread = std::thread{[this] { work(); }};
        return true;
    } catch (const std::system_error& error) {
        spdlog::warn("starting a thread that watches for deaths: {}", error.what());
        return false;
    }
}

void WatchThread::work() {
    ::pthread_setname_np(::pthread_self(), "death-watch");
    std::array<futex_waitv, words_max + 1> waiters;
    long woken = 0;  // index of the woken waiter; 0: our own word, negative: none
    while (true) {
        std::size_t count = 0;
        std::vector<Entry> left;  // unmapped after the lock is released
        {
            const std::lock_guard lock{mutex};
            if (ending) return;
            waiters[count++] = waiter(&changes, changes.load(), FUTEX_PRIVATE_FLAG);
            // Others only follow at the end.
            if (woken > 0) ++entries[static_cast<std::size_t>(woken) - 1].empty_wakes;
            for (std::size_t i = 0; i < entries.size();) {
                const std::uint32_t value = entries[i].page->word();
                if ((value & FUTEX_OWNER_DIED) != 0) DeathWatch::Watch::tell_later(io, entries[i].watch);
                if (value == entries[i].alive_value && entries[i].empty_wakes <= empty_wakes_max &&
                    !entries[i].watch.expired()) {
                    waiters[count++] = waiter(entries[i].page->word_address(), value, 0);
                    ++i;
                    continue;
                }
                left.push_back(std::move(entries[i]));
                std::swap(entries[i], entries.back());
                entries.pop_back();
            }
        }
        left.clear();
        // Look again whatever it returns. A word that changed meanwhile makes it return at once.
        woken = ::syscall(SYS_futex_waitv, waiters.data(), count, 0, nullptr, CLOCK_MONOTONIC);
    }
}

WatchThread* DeathWatch::State::thread_with_room() {
    const std::lock_guard lock{mutex};
    for (const auto& thread : threads)
        if (thread->entries.size() < words_max) return thread.get();
    auto thread = std::make_unique<WatchThread>(io, mutex);
    if (!thread->start()) return nullptr;
    return threads.emplace_back(std::move(thread)).get();
}

DeathWatch::DeathWatch(boost::asio::io_context& io) : state_{std::make_shared<State>(io)} {}

DeathWatch::~DeathWatch() {
    {
        const std::lock_guard lock{state_->mutex};
        for (const auto& thread : state_->threads) thread->ending = true;
    }
    for (const auto& thread : state_->threads) {
        thread->nudge();
        thread->thread.join();
    }
}

std::shared_ptr<DeathWatch::Watch> DeathWatch::watch(std::shared_ptr<const WorkerPageView> page,
                                                     std::function<void()> died) {
    const std::shared_ptr<Watch> watch{new Watch{state_, std::move(died)}};
    const std::uint32_t value = page->word();
    if ((value & FUTEX_OWNER_DIED) != 0) {
        Watch::tell_later(state_->io, watch);
        return watch;
    }
    WatchThread* thread = is_supported() ? state_->thread_with_room() : nullptr;
    if (thread == nullptr) return watch;
    {
        const std::lock_guard lock{state_->mutex};
        thread->entries.push_back({std::move(page), value, 0, watch});
    }
    watch->thread = thread;
    thread->nudge();
    return watch;
}

bool DeathWatch::is_supported() {
    // A kernel that knows the call refuses zero words with EINVAL.
    static const bool supported =
        ::syscall(SYS_futex_waitv, nullptr, 0, 0, nullptr, CLOCK_MONOTONIC) == -1 && errno == EINVAL;
    return supported;
}

}  // namespace bulkhead::supervisor

#pragma once

#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <future>
#include <new>
#include <string_view>
#include <thread>

#include "ipc/base/unique_fd.h"
#include "ipc/links/worker_page.h"

namespace bulkhead::supervisor::test {

/// A worker's page as a worker makes it, mapped writable.
class WritablePage {
public:
    WritablePage() : memfd_{::memfd_create("bulkhead-test-page", MFD_CLOEXEC | MFD_ALLOW_SEALING)} {
        if (::ftruncate(memfd_.get(), worker_page::page_bytes) != 0) std::abort();
        void* bytes = ::mmap(nullptr, worker_page::page_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, memfd_.get(), 0);
        if (bytes == MAP_FAILED) std::abort();
        page_ = new (bytes) worker_page::Page{};
        ::fcntl(memfd_.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
    }
    ~WritablePage() { ::munmap(page_, worker_page::page_bytes); }
    WritablePage(const WritablePage&) = delete;
    WritablePage& operator=(const WritablePage&) = delete;

    /// The calling thread holds the word for the rest of its life.
    void hold() {
        pthread_mutexattr_t attributes;
        ::pthread_mutexattr_init(&attributes);
        ::pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
        ::pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
        auto* mutex = reinterpret_cast<pthread_mutex_t*>(page_->alive.data());
        ::pthread_mutex_init(mutex, &attributes);
        if (::pthread_mutex_lock(mutex) != 0) std::abort();
        __atomic_fetch_or(word(), FUTEX_WAITERS, __ATOMIC_RELEASE);
        page_->magic_number = worker_page::magic;
    }
    void runs(std::string_view request, std::uint64_t since_ns) {
        ++page_->request_sequence;
        page_->request.fill('\0');
        request.copy(page_->request.data(), page_->request.size() - 1);
        ++page_->request_sequence;
        page_->running_since_ns = since_ns;
    }

    [[nodiscard]] worker_page::Page& page() noexcept { return *page_; }
    [[nodiscard]] std::uint32_t* word() noexcept { return reinterpret_cast<std::uint32_t*>(page_->alive.data()); }
    [[nodiscard]] const UniqueFd& memfd() const noexcept { return memfd_; }

private:
    UniqueFd memfd_;
    worker_page::Page* page_ = nullptr;
};

/// A thread that holds the word of a page until the test lets it end: what the kernel does with a
/// robust mutex it does for each thread.
class PageOwner {
public:
    PageOwner() {
        std::promise<void> holds;
        auto held = holds.get_future();
        thread_ = std::thread{[this, holds = std::move(holds), end = end_.get_future()]() mutable {
            page_.hold();
            holds.set_value();
            end.wait();
        }};
        held.wait();
    }
    ~PageOwner() { die(); }
    PageOwner(const PageOwner&) = delete;
    PageOwner& operator=(const PageOwner&) = delete;

    void die() {
        if (!thread_.joinable()) return;
        end_.set_value();
        thread_.join();
    }
    [[nodiscard]] WritablePage& page() noexcept { return page_; }

private:
    WritablePage page_;
    std::promise<void> end_;
    std::thread thread_;
};

}  // namespace bulkhead::supervisor::test

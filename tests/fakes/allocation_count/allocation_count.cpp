/// Counts every allocation of a process: loaded by LD_PRELOAD into a worker, linked into the test that is its client.
///
///   ALLOCATION_COUNT_FILE  at least 8 bytes: where the count is kept, for others to read; without it, in the process.
///                          Where its highest bit was set, the next allocation aborts the process: a core of who it was

#include "tests/fakes/allocation_count/allocation_count.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdlib>

// glibc's own, by the names that a replacement is meant to use.
extern "C" {
void* __libc_malloc(std::size_t);
void* __libc_calloc(std::size_t, std::size_t);
void* __libc_realloc(void*, std::size_t);
void* __libc_memalign(std::size_t, std::size_t);
void __libc_free(void*);
}

namespace bulkhead::test {
namespace {

constinit AllocationCount in_process{};
constinit std::atomic<AllocationCount*> count{&in_process};

/// Set in the counter from outside: whoever allocates from then on is to be caught in the act.
constexpr std::uint64_t trap = std::uint64_t{1} << 63;

[[gnu::constructor]] void find_file() {
    const char* const file = std::getenv("ALLOCATION_COUNT_FILE");
    if (file == nullptr) return;
    const int fd = ::open(file, O_RDWR | O_CLOEXEC);
    if (fd < 0) return;
    void* const memory = ::mmap(nullptr, sizeof(AllocationCount), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    ::close(fd);
    if (memory != MAP_FAILED) count.store(static_cast<AllocationCount*>(memory));
}

void add() noexcept {
    if (count.load(std::memory_order_relaxed)->allocations.fetch_add(1, std::memory_order_relaxed) >= trap) ::abort();
}

}  // namespace

AllocationCount& allocation_count() noexcept { return *count.load(); }

}  // namespace bulkhead::test

using bulkhead::test::add;

extern "C" {
[[gnu::visibility("default")]] void* malloc(std::size_t size) { return add(), __libc_malloc(size); }
[[gnu::visibility("default")]] void* calloc(std::size_t n, std::size_t size) { return add(), __libc_calloc(n, size); }
[[gnu::visibility("default")]] void* realloc(void* p, std::size_t size) { return add(), __libc_realloc(p, size); }
[[gnu::visibility("default")]] void free(void* p) { __libc_free(p); }
[[gnu::visibility("default")]] void* memalign(std::size_t alignment, std::size_t size) {
    return add(), __libc_memalign(alignment, size);
}
[[gnu::visibility("default")]] void* aligned_alloc(std::size_t alignment, std::size_t size) {
    return add(), __libc_memalign(alignment, size);
}
[[gnu::visibility("default")]] int posix_memalign(void** p, std::size_t alignment, std::size_t size) {
    *p = (add(), __libc_memalign(alignment, size));
    return *p == nullptr ? ENOMEM : 0;
}
}

#include "ipc/base/closed_in_child.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <mutex>
#include <utility>
#include <vector>

namespace bulkhead {
namespace {

struct Entry {
    int fd;
    std::span<std::byte> not_inherited;
};

struct Registry {
    std::mutex mutex;
    std::vector<Entry> entries;
    std::uint64_t forks = 0;  ///< forks between the first process and this one; written while only
                              ///< one thread exists
};

/// Never destroyed: a thread may fork while the program ends.
Registry& registry() {
    static Registry& only = *new Registry;
    return only;
}

/// Returns a socket without a peer; if only one number is free, one that never had a peer, which
/// fails too. -1: none.
int dead_socket() {
    std::array<int, 2> pair{-1, -1};
    if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair.data()) != 0)
        return ::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    ::close(pair[1]);
    return pair[0];
}

/// The child has one thread and may be forked from any: system calls only.
void close_in_child() {
    Registry& all = registry();
    ++all.forks;
    int dead = all.entries.empty() ? -1 : dead_socket();
    bool in_place = false;  // it has the number of an entry
    for (const auto& [fd, memory] : all.entries) {
        if (dead < 0) {  // no number is free: free this one
            ::close(fd);
            dead = dead_socket();
            in_place = dead == fd;
        }
        // A number above a lowered limit may stay free: no call can take it.
        if (dead != fd && ::dup3(dead, fd, O_CLOEXEC) < 0) ::close(fd);
        if (!memory.empty())
            ::mmap(memory.data(), memory.size(), PROT_NONE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
    }
    if (dead >= 0 && !in_place) ::close(dead);
    all.entries.clear();
    all.mutex.unlock();
}

void watch_forks() {
    static const int watched =
        ::pthread_atfork([] { registry().mutex.lock(); }, [] { registry().mutex.unlock(); }, [] { close_in_child(); });
    static_cast<void>(watched);  // fails only without memory for one entry
}

}  // namespace

ClosedInChild::ClosedInChild(int fd, std::span<std::byte> not_inherited) : fd_{fd} {
    watch_forks();
    Registry& all = registry();
    const std::lock_guard lock{all.mutex};
    all.entries.push_back({fd, not_inherited});
    fork_ = all.forks;
}

ClosedInChild::ClosedInChild(ClosedInChild&& other) noexcept : fd_{std::exchange(other.fd_, -1)}, fork_{other.fork_} {}

ClosedInChild& ClosedInChild::operator=(ClosedInChild&& other) noexcept {
    ClosedInChild previous{std::move(*this)};
    fd_ = std::exchange(other.fd_, -1);
    fork_ = other.fork_;
    return *this;
}

ClosedInChild::~ClosedInChild() {
    if (fd_ < 0 || in_child()) return;
    Registry& all = registry();
    const std::lock_guard lock{all.mutex};
    const auto found = std::ranges::find(all.entries, fd_, &Entry::fd);
    if (found != all.entries.end()) all.entries.erase(found);
}

bool ClosedInChild::in_child() const noexcept { return fd_ >= 0 && fork_ != registry().forks; }

}  // namespace bulkhead

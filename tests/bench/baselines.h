#pragma once

/// What the machine itself needs: two processes that wake each other, and a copy. Measured in the
/// run of whatever is held against them.

#include <linux/futex.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <vector>

#include "tests/bench/record.h"

namespace bulkhead::bench {

/// Two processes, one word each way, both asleep in between: what a wake-up costs on this machine.
class FutexPingPong {
public:
    FutexPingPong() {
        void* shared = ::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        word_ = new (shared) std::atomic<std::uint32_t>{0};
        child_ = ::fork();
        if (child_ == 0) {
            ::prctl(PR_SET_PDEATHSIG, SIGKILL);  // it holds the ends of pipes that peers wait at
            for (std::uint32_t turn = 1;; turn += 2) {
                wait_for(turn);
                if (word_->load() == end) ::_exit(0);
                post(turn + 1);
            }
        }
    }
    ~FutexPingPong() {
        post(end);
        ::waitpid(child_, nullptr, 0);
        ::munmap(word_, 4096);
    }
    FutexPingPong(const FutexPingPong&) = delete;
    FutexPingPong& operator=(const FutexPingPong&) = delete;

    [[nodiscard]] pid_t other() const noexcept { return child_; }
    void round_trip() {
        post(turn_ + 1);
        wait_for(turn_ + 2);
        turn_ += 2;
    }
    /// Microseconds of each.
    std::vector<double> round_trips(std::size_t count) {
        std::vector<double> all;
        all.reserve(count);
        for (std::size_t i = 0; i < count; ++i) all.push_back(microseconds([&] { round_trip(); }));
        return all;
    }

private:
    static constexpr std::uint32_t end = 0xffff'ffff;
    void post(std::uint32_t value) {
        word_->store(value);
        ::syscall(SYS_futex, word_, FUTEX_WAKE, 1, nullptr, nullptr, 0);
    }
    void wait_for(std::uint32_t value) {
        for (std::uint32_t seen = word_->load(); seen != value && seen != end; seen = word_->load())
            ::syscall(SYS_futex, word_, FUTEX_WAIT, seen, nullptr, nullptr, 0);
    }
    std::atomic<std::uint32_t>* word_;
    pid_t child_;
    std::uint32_t turn_ = 0;
};

/// One copy between two resident buffers of this size.
class Memcpy {
public:
    explicit Memcpy(std::size_t bytes) : source_(bytes, 1), target_(bytes, 2) {}
    std::vector<double> copies(std::size_t count) {
        std::vector<double> all;
        for (std::size_t i = 0; i < count; ++i)
            all.push_back(microseconds([&] { std::memcpy(target_.data(), source_.data(), source_.size()); }));
        return all;
    }

private:
    std::vector<char> source_;
    std::vector<char> target_;
};

}  // namespace bulkhead::bench

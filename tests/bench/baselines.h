#pragma once

/// What the machine itself needs: two processes that wake each other, a copy, and reading by all
/// cores. Measured in the run of whatever is held against them. And a busy neighbour.

#include <linux/futex.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <span>
#include <thread>
#include <vector>

#include "tests/bench/placement.h"
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

/// All cores that this process may use read 1 GiB, each a part of it.
class Reading {
public:
    /// Bytes a second, of the fastest of `passes`.
    double best(int passes) {
        double us = std::numeric_limits<double>::infinity();
        for (int pass = 0; pass < passes; ++pass) us = std::min(us, microseconds([this] { read(); }));
        return static_cast<double>(memory_.size() * sizeof memory_.front()) / (us / 1e6);
    }

private:
    void read() {
        const std::size_t threads = allowed_cpus().size();
        std::vector<std::jthread> readers;
        for (std::size_t i = 0; i < threads; ++i) {
            const std::size_t begin = memory_.size() * i / threads;
            const std::size_t end = memory_.size() * (i + 1) / threads;
            readers.emplace_back([this, part = std::span{memory_}.subspan(begin, end - begin)] {
                std::array<std::uint64_t, 8> sums{};
                for (std::size_t at = 0; at + sums.size() <= part.size(); at += sums.size())
                    for (std::size_t lane = 0; lane < sums.size(); ++lane) sums[lane] += part[at + lane];
                sum_ += std::accumulate(sums.begin(), sums.end(), std::uint64_t{0});
            });
        }
    }

    std::vector<std::uint64_t> memory_ = std::vector<std::uint64_t>((std::size_t{1} << 30) / sizeof(std::uint64_t), 1);
    std::atomic<std::uint64_t> sum_{0};  ///< so that no compiler leaves the reading out
};

/// A thread that never sleeps, on no core in particular.
class BusyThread {
public:
    BusyThread()
        : thread_{[](const std::stop_token& stop) {
              while (!stop.stop_requested()) busy_.fetch_add(1, std::memory_order_relaxed);
          }} {}

private:
    static inline std::atomic<std::uint64_t> busy_;
    std::jthread thread_;
};

}  // namespace bulkhead::bench

#pragma once

/// A client process of the channel bench. On stdin come rounds, on stdout go their measurements;
/// all numbers are little-endian and of 8 bytes; rounds.py is the same in Python.
///
///   once       ->  u64 0 after a warm-up of its own, or u64 N and N bytes: why it cannot
///   u64 budget ->  u64 count, then count doubles: microseconds of each request, one after the
///                  other, until so many
///   have
///                  passed; then begin and end on CLOCK_MONOTONIC, and the processor time of this
///                      process meanwhile, in
///                  us
///   end of file: the process ends

#include <sys/resource.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <string>
#include <vector>

namespace bulkhead::bench {

inline double monotonic_us() {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration<double, std::micro>(now).count();
}

inline double own_processor_us() {
    rusage usage{};
    ::getrusage(RUSAGE_SELF, &usage);
    const auto us = [](const timeval& time) {
        return static_cast<double>(time.tv_sec) * 1e6 + static_cast<double>(time.tv_usec);
    };
    return us(usage.ru_utime) + us(usage.ru_stime);
}

inline int refuse_rounds(const std::string& why) {
    const std::uint64_t size = why.size();
    std::fwrite(&size, sizeof size, 1, stdout);
    std::fwrite(why.data(), 1, why.size(), stdout);
    return 1;
}

/// `request` returns why it failed; empty: it did not. A failure later than the warm-up
/// ends the process.
inline int serve_rounds(int warm_up, const std::function<std::string()>& request) {
    for (int i = 0; i < warm_up; ++i)
        if (const std::string why = request(); !why.empty()) return refuse_rounds(why);
    const std::uint64_t good = 0;
    std::fwrite(&good, sizeof good, 1, stdout);
    std::fflush(stdout);
    std::vector<double> measured;
    for (std::uint64_t budget_us = 0; std::fread(&budget_us, sizeof budget_us, 1, stdin) == 1;) {
        measured.clear();
        const double processor = own_processor_us();
        const double begin = monotonic_us();
        double last = begin;
        while (last - begin < static_cast<double>(budget_us)) {
            if (const std::string why = request(); !why.empty()) return std::fprintf(stderr, "%s\n", why.c_str()), 1;
            const double now = monotonic_us();
            measured.push_back(now - last);
            last = now;
        }
        const std::uint64_t count = measured.size();
        measured.insert(measured.end(), {begin, last, own_processor_us() - processor});
        std::fwrite(&count, sizeof count, 1, stdout);
        std::fwrite(measured.data(), sizeof(double), measured.size(), stdout);
        std::fflush(stdout);
    }
    return 0;
}

}  // namespace bulkhead::bench

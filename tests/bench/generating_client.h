#pragma once

/// What the benches of models that generate share: one client of the daemon, and what it saw of
/// its sequences.

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include "tests/bench/record.h"
#include "tests/support/daemon/daemon.h"

namespace bulkhead::bench {

/// So many ids; `first` differs from request to request, so that no prefix is known already.
inline std::vector<std::int64_t> prompt(std::size_t length, std::int64_t first = 1) {
    std::vector<std::int64_t> ids(length);
    std::iota(ids.begin(), ids.end(), 1000);
    ids.front() = first;
    return ids;
}

/// One client of the daemon, and what it saw of its sequences.
class GeneratingClient {
public:
    explicit GeneratingClient(const test::Daemon& daemon, const std::string& model = "smollm2")
        : channel_{daemon.open(model, "bench").value()} {}

    struct Seen {
        double first_us = 0;
        double all_us = 0;
        std::vector<double> gaps_us;  ///< between a token and the next
    };
    /// `at_first`: called when the first token has come.
    Seen generate(std::size_t length, int count, const std::function<void()>& at_first = {}) {
        static std::atomic<std::int64_t> last_first{2000};
        const std::vector<std::int64_t> ids = prompt(length, ++last_first);
        const std::array<std::int64_t, 1> dims{static_cast<std::int64_t>(length)};
        Input tokens = channel_.allocate(wire::DType::int64, dims).value();
        std::ranges::copy(ids, tokens.as<std::int64_t>().begin());
        const std::array<NamedInput, 1> inputs{{{"tokens", &tokens}}};
        Seen seen;
        const auto start = Clock::now();
        const auto since_start = [&] { return std::chrono::duration<double, std::micro>(Clock::now() - start).count(); };
        const std::uint64_t request =
            channel_
                .submit({.method = "generate",
                         .inputs = inputs,
                         .parameters = {{"temperature", 0}, {"max_new_tokens", count}, {"ignore_stop", true}},
                         .in_parts = true})
                .value();
        double before = 0;
        for (Reply part = channel_.next(request).value(); part.more; part = channel_.next(request).value()) {
            const double now = since_start();
            const auto tokens_now = static_cast<double>(part.values.at("tokens").as_array().size());
            if (before == 0) seen.first_us = now;
            if (before == 0 && at_first) at_first();
            for (double i = 0; before > 0 && i < tokens_now; ++i) seen.gaps_us.push_back((now - before) / tokens_now);
            before = now;
        }
        seen.all_us = since_start();
        return seen;
    }

private:
    Channel channel_;
};

inline double per_second(double count, double us) { return count / (us / 1e6); }

}  // namespace bulkhead::bench

#pragma once

/// The clients of the channel bench, and what they exchange with their servers.

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "tests/bench/peers/peer.h"
#include "tests/bench/placement.h"

namespace bulkhead::bench {

/// What goes there, and how much of it comes back: all, or its first 4 bytes.
struct Exchange {
    std::uint64_t bytes;
    bool echo;
    int clients;
    On on = On::any_cpu;

    [[nodiscard]] std::uint64_t answer_bytes() const { return echo ? bytes : 4; }
    [[nodiscard]] std::string size() const {
        return bytes >= 1 << 30   ? std::to_string(bytes >> 30) + " GB"
               : bytes >= 1 << 20 ? std::to_string(bytes >> 20) + " MB"
                                  : std::to_string(bytes) + " B";
    }
    [[nodiscard]] std::string name() const {
        const char* where = on == On::one_cpu ? ", one CPU" : on == On::two_cpus ? ", a CPU each" : "";
        return size() + (echo ? " and back, " : " there, 4 B back, ") + std::to_string(clients) +
               (clients == 1 ? " client" : " clients") + where;
    }
};

/// A way for a payload between processes.
struct Way {
    std::string name;
    std::function<std::vector<std::string>(const Exchange&)> client;  ///< its command line
    std::vector<std::string> environment;
    std::vector<pid_t> servers;
    double payloads;        ///< that one client and its part of the server hold at
                            ///< once, for an echo
    double payloads_there;  ///< the same where it only goes there

    [[nodiscard]] double bytes_held(const Exchange& exchange) const {
        return (exchange.echo ? payloads : payloads_there) * static_cast<double>(exchange.bytes) * exchange.clients;
    }
};

struct Measured {
    std::vector<double> latencies_us;
    double wall_us = 0;       ///< from the first request's begin to the last one's end
    double processor_us = 0;  ///< clients and servers
};

/// The clients of one way while one exchange is measured. One that cannot take part, or is lost,
/// takes its crowd out.
class Crowd {
public:
    /// Starts them, and waits for the end of their warm-up.
    Crowd(const Way& way, const Exchange& exchange, const Placement& placement);

    [[nodiscard]] const Way& way() const { return *way_; }
    /// Why it is left out; empty: it is not.
    [[nodiscard]] const std::string& cannot() const { return cannot_; }
    [[nodiscard]] const Measured& so_far() const { return so_far_; }
    /// Returns  the median of this round's latencies; NaN where one of them is lost, and
    ///          `cannot` says so
    double round();

private:
    double measured_round();

    const Way* way_;
    std::vector<Peer> clients_;
    std::string cannot_;
    Measured so_far_;
};

}  // namespace bulkhead::bench

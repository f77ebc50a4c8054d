#include "tests/bench/crowd.h"

#include <algorithm>
#include <limits>

#include "tests/bench/record.h"

namespace bulkhead::bench {
namespace {

constexpr std::uint64_t round_us = 200'000;  ///< at least one request

double processor_us_of(const std::vector<pid_t>& pids) {
    double sum = 0;
    for (const pid_t pid : pids) sum += processor_us(pid);
    return sum;
}

}  // namespace

Crowd::Crowd(const Way& way, const Exchange& exchange, const Placement& placement) : way_{&way} {
    for (int i = 0; i < exchange.clients; ++i) clients_.emplace_back(way.client(exchange), way.environment);
    for (const pid_t server : way.servers) placement.server(server);
    for (Peer& client : clients_) {
        if (std::string why = client.await_ready(); !why.empty()) cannot_ = std::move(why);
        placement.client(client.pid());
    }
}

double Crowd::round() {
    try {
        return measured_round();
    } catch (const PeerLost& lost) {
        cannot_ = lost.what();
        return std::numeric_limits<double>::quiet_NaN();
    }
}

double Crowd::measured_round() {
    const std::size_t earlier = so_far_.latencies_us.size();
    const double servers_before = processor_us_of(way_->servers);
    for (Peer& client : clients_) client.start_round(round_us);
    double begin = std::numeric_limits<double>::max();
    double end = 0;
    for (Peer& client : clients_) {
        const Peer::Round one = client.collect();
        so_far_.latencies_us.insert(so_far_.latencies_us.end(), one.latencies_us.begin(), one.latencies_us.end());
        so_far_.processor_us += one.processor_us;
        begin = std::min(begin, one.begin_us);
        end = std::max(end, one.end_us);
    }
    so_far_.wall_us += end - begin;
    so_far_.processor_us += processor_us_of(way_->servers) - servers_before;
    return median({so_far_.latencies_us.begin() + static_cast<std::ptrdiff_t>(earlier), so_far_.latencies_us.end()});
}

}  // namespace bulkhead::bench

// Embeddings a second through the daemon, beside the same package called in-process; and what a
// request takes while OpenMP's threads look for work more or less often before they sleep, and the
// first after a load.

#include <cstdio>
#include <cstdlib>
#include <future>
#include <thread>

#include <fmt/format.h>

#include "tests/bench/baselines.h"
#include "tests/bench/placement.h"
#include "tests/bench/record.h"
#include "tests/support/daemon/daemon.h"
#include "tests/support/daemon/fleets.h"

namespace bulkhead::bench::embeddings_bench {
namespace {

constexpr std::int64_t tokens = 16;
constexpr int per_round = 200;

/// One client's share of a round.
void embed(Channel& channel, int count, std::int64_t length = tokens) {
    const std::array<std::int64_t, 2> dims{1, length};
    auto ids = channel.allocate(wire::DType::int64, dims).value();
    auto mask = channel.allocate(wire::DType::int64, dims).value();
    std::ranges::fill(ids.as<std::int64_t>(), 2003);
    std::ranges::fill(mask.as<std::int64_t>(), 1);
    const std::array<NamedInput, 2> inputs{{{"input_ids", &ids}, {"attention_mask", &mask}}};
    Request request;
    request.inputs = inputs;
    for (int i = 0; i < count; ++i) (void)channel.infer(request).value();
}

double per_second(double microseconds_of_round) { return per_round / (microseconds_of_round / 1e6); }

Records embeddings() {
    // threads: all cores, on both sides.
    test::Daemon daemon{test::fleet({test::minilm("threads: " + std::to_string(allowed_cpus().size()))})};
    (void)daemon.load("minilm").value();
    Records records;
    for (const int clients : {1, 4}) {
        std::vector<Channel> channels;
        for (int i = 0; i < clients; ++i) channels.push_back(daemon.open("minilm", "bench").value());
        const auto through_daemon = [&] {
            return per_second(microseconds([&] {
                std::vector<std::jthread> threads;
                for (Channel& channel : channels)
                    threads.emplace_back([&channel, clients] { embed(channel, per_round / clients); });
            }));
        };
        std::string lost;
        const auto in_process = [&lost] {
            const auto finished =
                test::run({test::program("bare_libtorch"), "throughput", "aoti", test::model_file("minilm.pt2"),
                           std::to_string(tokens), std::to_string(per_round)});
            if (finished.exit_code != 0)
                lost = "bare_libtorch ended with status " + std::to_string(finished.exit_code) + ": " + finished.err;
            return std::strtod(finished.out.c_str(), nullptr);
        };
        (void)through_daemon();
        const Pair pair = interleaved(7, through_daemon, in_process);
        const std::string peer = "in-process LibTorch, its own defaults";
        if (!lost.empty()) std::printf("  without %s: %s\n", peer.c_str(), lost.c_str());
        records.push_back(
            {"embeddings of 16 tokens, " + std::to_string(clients) + (clients == 1 ? " client" : " clients"),
             pair.value, "1/s", lost.empty() ? peer : "", lost.empty() ? pair.baseline : 0});
    }
    return records;
}

/// How often OpenMP's threads look for work before they sleep. The last is libgomp's default.
constexpr std::array<int, 6> looks{0, 1000, 2000, 20'000, 20'000, 300'000};
constexpr std::size_t bound_looks = 4;  ///< the number of `looks` whose threads keep to a core each
constexpr int rounds_of_looks = 7;
constexpr int requests_of_looks = 60;

/// The number `which` of `looks`, and another worker like it: a request of each in ms.
struct Looking {
    Looking(test::Daemon& daemon, std::size_t which) {
        for (const char* suffix : {"", "-too"}) channels.push_back(daemon.open(name(which) + suffix, "bench").value());
    }
    static std::string name(std::size_t which) { return "minilm-" + std::to_string(which); }
    static std::string models(std::size_t which) {
        const std::string extra =
            fmt::format("threads: {}\nenvironment: {{GOMP_SPINCOUNT: {}{}}}\n", allowed_cpus().size(), looks[which],
                        which == bound_looks ? ", OMP_PROC_BIND: true" : "");
        std::string both;
        for (const char* suffix : {"", "-too"}) {
            std::string one = test::minilm(extra);
            both += one.replace(one.find("minilm:"), 6, name(which) + suffix);
        }
        return both;
    }
    double request_ms(std::size_t channel) {
        return microseconds([&] { embed(channels[channel], requests_of_looks); }) / requests_of_looks / 1e3;
    }
    void round() {
        alone.push_back(request_ms(0));
        {
            const BusyThread busy;
            beside_busy.push_back(request_ms(0));
        }
        auto other = std::async(std::launch::async, [this] { return request_ms(1); });
        const double one = request_ms(0);
        at_once.push_back((one + other.get()) / 2);
    }
    std::vector<Channel> channels;
    std::vector<double> alone;
    std::vector<double> beside_busy;
    std::vector<double> at_once;
};

Records openmp_looks() {
    std::string models;
    for (std::size_t which = 0; which < looks.size(); ++which) models += Looking::models(which);
    test::Daemon daemon{test::fleet({models})};
    std::vector<Looking> all;
    for (std::size_t which = 0; which < looks.size(); ++which) {
        for (const char* suffix : {"", "-too"}) (void)daemon.load(Looking::name(which) + suffix).value();
        all.emplace_back(daemon, which);
    }
    for (int round = 0; round < rounds_of_looks; ++round)
        for (Looking& each : all) each.round();
    Records records;
    for (const auto& [what, times] : {std::pair{"alone", &Looking::alone},
                                      {"beside a busy thread", &Looking::beside_busy},
                                      {"two such models at once", &Looking::at_once}})
        for (std::size_t which = 0; which < looks.size(); ++which)
            records.push_back({fmt::format("{}: {} looks{}", what, looks[which], which == bound_looks ? ", bound" : ""),
                               median(all[which].*times), "ms", "no look", median(all.front().*times)});
    return records;
}

/// The first request after a load beside later ones, at the length that the load warmed up and at
/// the longest, which it did not meet.
Records first_requests() {
    test::Daemon daemon{test::fleet({test::minilm("threads: " + std::to_string(allowed_cpus().size()))})};
    Records records;
    for (const std::int64_t length : {tokens, std::int64_t{256}}) {
        std::vector<double> firsts;
        std::vector<double> others;
        for (int load = 0; load < 10; ++load) {
            (void)daemon.load("minilm").value();
            {
                Channel channel = daemon.open("minilm", "bench").value();
                firsts.push_back(microseconds([&] { embed(channel, 1, length); }) / 1e3);
                for (int later = 0; later < 5; ++later)
                    others.push_back(microseconds([&] { embed(channel, 1, length); }) / 1e3);
            }
            (void)daemon.unload("minilm").value();
        }
        records.push_back({fmt::format("first request after a load, {} tokens", length), median(firsts), "ms",
                           "later requests", median(others)});
    }
    return records;
}

const Bench first_bench{"first", "MiniLM: what first use costs", first_requests};
const Bench looks_bench{"looks", "16 tokens of MiniLM, by how long OpenMP's threads look for work", openmp_looks};
const Bench embeddings_bench{"embeddings", "MiniLM through the daemon; higher is better", embeddings};

}  // namespace
}  // namespace bulkhead::bench::embeddings_bench

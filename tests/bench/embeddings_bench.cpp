// Embeddings a second through the daemon, beside the same package called in-process.

#include <cstdio>
#include <cstdlib>
#include <thread>

#include "tests/bench/placement.h"
#include "tests/bench/record.h"
#include "tests/integration/fixture/daemon.h"
#include "tests/integration/fixture/fleets.h"

namespace bulkhead::bench::embeddings_bench {
namespace {

constexpr std::int64_t tokens = 16;
constexpr int per_round = 200;

/// One client's share of a round.
void embed(Channel& channel, int count) {
    const std::array<std::int64_t, 2> dims{1, tokens};
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

const Bench embeddings_bench{"embeddings", "MiniLM through the daemon; higher is better", embeddings};

}  // namespace
}  // namespace bulkhead::bench::embeddings_bench

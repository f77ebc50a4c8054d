// Tokens a second on the CPU: through the daemon, from the same package in a plain program, and by Hugging Face; and
// what the memory allows.

#include <algorithm>
#include <atomic>
#include <fstream>
#include <functional>
#include <numeric>
#include <optional>
#include <span>
#include <thread>

#include <boost/json.hpp>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tests/bench/generating_client.h"
#include "tests/bench/peers/peer.h"
#include "tests/bench/record.h"
#include "tests/integration/fixture/daemon.h"
#include "tests/integration/fixture/fleets.h"

namespace bulkhead::bench {
namespace {

namespace json = boost::json;

constexpr int new_tokens = 128;
constexpr int rounds = 5;
constexpr std::size_t prompt_short = 24;
constexpr std::size_t prompt_long = 512;

using Client = GeneratingClient;

std::string text_of(const std::vector<std::int64_t>& ids) { return fmt::format("{}", fmt::join(ids, ",")); }

/// So many clients at once; tokens a second of all together.
double together(std::vector<Client>& clients) {
    return per_second(static_cast<double>(clients.size()) * new_tokens, microseconds([&] {
                          std::vector<std::jthread> threads;
                          for (Client& client : clients)
                              threads.emplace_back([&client] { client.generate(prompt_short, new_tokens); });
                      }));
}

double longest_gap_ms(const Client::Seen& seen) { return *std::ranges::max_element(seen.gaps_us) / 1e3; }

/// Between tokens of one client's sequence, in whose midst another one's long prompt is computed.
double longest_gap_beside_ms(Client& running, Client& newcomer) {
    std::jthread other;
    return longest_gap_ms(running.generate(prompt_short, new_tokens, [&] {
        other = std::jthread{[&newcomer] { newcomer.generate(prompt_long, 1); }};
    }));
}

double request_us(Peer& peer) {
    peer.start_round(1);
    return peer.collect().latencies_us.front();
}

void leave_out(const std::string& name, const std::string& why) {
    std::printf("  without %s: %s\n", name.c_str(), why.c_str());
    std::fflush(stdout);
}

/// A peer that takes part, or nothing where it said why not.
std::optional<Peer> joined(std::vector<std::string> argv, const std::string& name,
                           const std::vector<std::string>& environment = {}) {
    std::optional<Peer> peer{std::in_place, std::move(argv), environment};
    if (const std::string why = peer->await_ready(); !why.empty()) {
        leave_out(name, why);
        return std::nullopt;
    }
    return peer;
}

std::optional<Peer> hugging_face(const std::string& cache, std::size_t length, int count) {
    return joined({BULKHEAD_PYTHON, BULKHEAD_SOURCE_DIR "/tests/bench/peers/hf_generate.py", cache,
                   std::to_string(count), text_of(prompt(length))},
                  "Hugging Face, " + cache);
}

/// All cores read 1 GiB: the best of several passes, bytes a second.
double read_bandwidth() {
    const std::size_t threads = std::max(1U, std::thread::hardware_concurrency());
    std::vector<std::uint64_t> memory((std::size_t{1} << 30) / sizeof(std::uint64_t), 1);
    const std::size_t share = memory.size() / threads;
    std::atomic<std::uint64_t> sum{0};
    double best_us = std::numeric_limits<double>::infinity();
    for (int pass = 0; pass < 8; ++pass)
        best_us = std::min(best_us, microseconds([&] {
                               std::vector<std::jthread> readers;
                               for (std::size_t i = 0; i < threads; ++i)
                                   readers.emplace_back([&, part = std::span{memory}.subspan(i * share, share)] {
                                       std::array<std::uint64_t, 8> sums{};
                                       for (std::size_t at = 0; at + sums.size() <= part.size(); at += sums.size())
                                           for (std::size_t lane = 0; lane < sums.size(); ++lane)
                                               sums[lane] += part[at + lane];
                                       sum += std::accumulate(sums.begin(), sums.end(), std::uint64_t{0});
                                   });
                           }));
    if (sum == 0) std::printf("  nothing was read\n");
    return static_cast<double>(share * threads * sizeof(std::uint64_t)) / (best_us / 1e6);
}

double weight_bytes(const std::filesystem::path& package) {
    std::ifstream file{package / "manifest.json"};
    return json::parse(file).at("weights").at("bytes").to_number<double>();
}

Records generation() {
    const std::filesystem::path package = test::model_file("smollm2");
    if (!std::filesystem::exists(package / "manifest.json")) {
        std::printf("  left out: %s is not there; scripts/models/prepare.py makes it\n", package.c_str());
        return {};
    }
    Records records;
    const double bandwidth = read_bandwidth();
    const std::string threads = fmt::format("threads: {}\n", std::thread::hardware_concurrency());
    const std::filesystem::path small = test::model_file("smollm2-int4");
    const bool with_int4 = std::filesystem::exists(small / "manifest.json");
    const test::Daemon daemon{test::fleet(
        {test::generating("smollm2", package, threads),
         test::generating("one-slot", package, threads + "generate: {slots: 1}"),
         test::generating("one-chunk", package, threads + fmt::format("generate: {{prefill_chunk: {}}}", prompt_long)),
         with_int4 ? test::generating("int4", small, threads) : std::string{}})};
    (void)daemon.load("smollm2").value();
    std::vector<Client> clients;
    clients.emplace_back(daemon);
    clients.front().generate(prompt_short, new_tokens);  // the warm-up

    std::vector<double> gaps;
    const auto through_daemon = [&] {
        Client::Seen seen = clients.front().generate(prompt_short, new_tokens);
        gaps.insert(gaps.end(), seen.gaps_us.begin(), seen.gaps_us.end());
        return per_second(new_tokens, seen.all_us);
    };
    const auto against = [&](std::optional<Peer> peer, const std::string& baseline) {
        if (!peer) return;
        try {
            const Pair pair =
                interleaved(rounds, through_daemon, [&] { return per_second(new_tokens, request_us(*peer)); });
            records.push_back({fmt::format("{} tokens behind {}, one sequence", new_tokens, prompt_short), pair.value,
                               "1/s", baseline, pair.baseline});
        } catch (const PeerLost& lost) {
            leave_out(baseline, lost.what());
        }
    };
    against(joined({test::program("generate_in_process"), package, daemon.folder().path() / "cache",
                    std::to_string(new_tokens), text_of(prompt(prompt_short))},
                   "the same package in-process"),
            "the same package in-process");
    against(hugging_face("eager", prompt_short, new_tokens), "Hugging Face generate, eager");
    against(hugging_face("static", prompt_short, new_tokens), "Hugging Face generate, static cache");
    {
        (void)daemon.load("one-slot").value();
        Client lone{daemon, "one-slot"};
        lone.generate(prompt_short, new_tokens);  // the warm-up
        const Pair pair = interleaved(rounds, through_daemon, [&] {
            return per_second(new_tokens, lone.generate(prompt_short, new_tokens).all_us);
        });
        records.push_back({"a lone sequence in a model of several slots", pair.value, "1/s",
                           "the same in a model of one slot", pair.baseline});
    }
    (void)daemon.unload("one-slot").value();
    if (with_int4) {
        (void)daemon.load("int4").value();
        Client client{daemon, "int4"};
        client.generate(prompt_short, new_tokens);  // the warm-up
        const Pair pair = interleaved(
            rounds, [&] { return per_second(new_tokens, client.generate(prompt_short, new_tokens).all_us); },
            through_daemon);
        records.push_back(
            {"weights of 4 bits, the head's of 8", pair.value, "1/s", "the same model in float32", pair.baseline});
        (void)daemon.unload("int4").value();
    } else {
        std::printf("  without weights of 4 bits: scripts/models/prepare_int4.py makes %s\n", small.c_str());
    }
    const double alone = median(std::vector<double>{through_daemon(), through_daemon(), through_daemon()});
    records.push_back({"weights read by the steps of one sequence", alone * weight_bytes(package) / 1e9, "GB/s",
                       "what all cores can read", bandwidth / 1e9});
    records.push_back({"p99 of a step", percentile(gaps, 0.99) / 1e3, "ms", "p50", median(gaps) / 1e3});

    for (const std::size_t length : {prompt_short, prompt_long}) {
        std::optional<Peer> peer = hugging_face("eager", length, 1);
        if (!peer) break;
        try {
            const Pair pair = interleaved(
                rounds, [&] { return clients.front().generate(length, 1).all_us / 1e3; },
                [&] { return request_us(*peer) / 1e3; });
            records.push_back({fmt::format("first token of a prompt of {}", length), pair.value, "ms",
                               "Hugging Face generate, eager", pair.baseline});
        } catch (const PeerLost& lost) {
            leave_out("Hugging Face, eager", lost.what());
        }
    }
    {
        Client newcomer{daemon};
        const auto beside = [&] { return longest_gap_beside_ms(clients.front(), newcomer); };
        const std::string name = fmt::format("longest gap between tokens, beside a prompt of {}", prompt_long);
        Pair pair = interleaved(rounds, beside,
                                [&] { return longest_gap_ms(clients.front().generate(prompt_short, new_tokens)); });
        records.push_back({name, pair.value, "ms", "alone", pair.baseline});
        (void)daemon.load("one-chunk").value();
        Client running{daemon, "one-chunk"};
        Client other{daemon, "one-chunk"};
        running.generate(prompt_short, new_tokens);  // the warm-up
        pair = interleaved(rounds, beside, [&] { return longest_gap_beside_ms(running, other); });
        records.push_back({name, pair.value, "ms", "the prompt in one chunk", pair.baseline});
    }
    (void)daemon.unload("one-chunk").value();
    for (const std::size_t count : {2, 4}) {
        while (clients.size() < count) clients.emplace_back(daemon);
        std::vector<double> rates;
        std::vector<double> alone_rates;
        for (int round = 0; round < rounds; ++round) {
            rates.push_back(together(clients));
            alone_rates.push_back(through_daemon());
        }
        records.push_back({fmt::format("{} sequences together, all tokens", count), median(rates), "1/s",
                           "one sequence", median(alone_rates)});
    }
    return records;
}

const Bench generation_bench{"generation", "SmolLM2-135M on the CPU; more tokens a second, and fewer ms, are better",
                             generation};

}  // namespace
}  // namespace bulkhead::bench

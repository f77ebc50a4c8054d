// Tokens a second on the CPU: through the daemon, from the same package in a plain program, and by
// Hugging Face; and what the memory allows.

#include <algorithm>
#include <atomic>
#include <fstream>
#include <functional>
#include <numeric>
#include <span>
#include <thread>

#include <boost/json.hpp>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tests/bench/baselines.h"
#include "tests/bench/generating_client.h"
#include "tests/bench/peers/peer.h"
#include "tests/bench/placement.h"
#include "tests/bench/record.h"
#include "tests/support/daemon/daemon.h"
#include "tests/support/daemon/fleets.h"

namespace bulkhead::bench::generation_bench {
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
    return longest_gap_ms(running.generate(
        prompt_short, new_tokens, [&] { other = std::jthread{[&newcomer] { newcomer.generate(prompt_long, 1); }}; }));
}

double request_us(Peer& peer) {
    peer.start_round(1);
    return peer.collect().latencies_us.front();
}

/// Has a peer take part, and says why where it does not.
void beside(const std::string& name, std::vector<std::string> argv, const std::function<void(Peer&)>& use) {
    if (const std::string why = take_part(std::move(argv), use); !why.empty()) {
        std::printf("  without %s: %s\n", name.c_str(), why.c_str());
        std::fflush(stdout);
    }
}

std::vector<std::string> hugging_face(const std::string& cache, std::size_t length, int count) {
    return {BULKHEAD_PYTHON, BULKHEAD_SOURCE_DIR "/tests/bench/peers/hf_generate.py", cache, std::to_string(count),
            text_of(prompt(length))};
}

double weight_bytes(const std::filesystem::path& package) {
    std::ifstream file{package / "manifest.json"};
    return json::parse(file).at("weights").at("bytes").to_number<double>();
}

/// SmolLM2 on a daemon, warmed up; with `others` beside it in the fleet file, which are loaded when
/// they are asked for.
class Served {
public:
    explicit Served(const std::string& others = {})
        : daemon{test::fleet({test::generating("smollm2", package(), threads()), others})} {
        (void)daemon.load("smollm2").value();
        clients.emplace_back(daemon);
        clients.front().generate(prompt_short, new_tokens);
    }
    static std::filesystem::path package() { return test::model_file("smollm2"); }
    static std::string threads() { return fmt::format("threads: {}\n", allowed_cpus().size()); }

    /// Tokens a second of one sequence.
    double rate() {
        Client::Seen seen = clients.front().generate(prompt_short, new_tokens);
        gaps.insert(gaps.end(), seen.gaps_us.begin(), seen.gaps_us.end());
        return per_second(new_tokens, seen.all_us);
    }

    const test::Daemon daemon;
    std::vector<Client> clients;
    std::vector<double> gaps;  ///< between tokens, of all `rate` so far
};

Record rate_beside(Served& served, Peer& peer, const std::string& baseline) {
    const Pair pair = interleaved(
        rounds, [&] { return served.rate(); }, [&] { return per_second(new_tokens, request_us(peer)); });
    return {fmt::format("{} tokens behind {}, one sequence", new_tokens, prompt_short), pair.value, "1/s", baseline,
            pair.baseline};
}

/// Of another model of the fleet, loaded and warmed up for `use`.
void with_model(const test::Daemon& daemon, const std::string& model, const std::function<void(Client&)>& use) {
    (void)daemon.load(model).value();
    {
        Client client{daemon, model};
        client.generate(prompt_short, new_tokens);
        use(client);
    }
    (void)daemon.unload(model).value();
}

Records one_sequence() {
    const double bandwidth = Reading{}.best(8);
    const std::filesystem::path int4 = test::model_file("smollm2-int4");
    const bool with_int4 = std::filesystem::exists(int4 / "manifest.json");
    const std::string one_slot =
        test::generating("one-slot", Served::package(), Served::threads() + "generate: {slots: 1}");
    Served served{one_slot + (with_int4 ? test::generating("int4", int4, Served::threads()) : "")};
    Records records;
    const auto rate_of = [](Client& client) {
        return per_second(new_tokens, client.generate(prompt_short, new_tokens).all_us);
    };

    const std::string in_process = "the same package in-process";
    beside(in_process,
           {test::program("generate_in_process"), Served::package(), served.daemon.folder().path() / "cache",
            std::to_string(new_tokens), text_of(prompt(prompt_short))},
           [&](Peer& peer) { records.push_back(rate_beside(served, peer, in_process)); });
    with_model(served.daemon, "one-slot", [&](Client& lone) {
        const Pair pair = interleaved(
            rounds, [&] { return served.rate(); }, [&] { return rate_of(lone); });
        records.push_back({"a lone sequence in a model of several slots", pair.value, "1/s",
                           "the same in a model of one slot", pair.baseline});
    });
    if (with_int4)
        with_model(served.daemon, "int4", [&](Client& small) {
            const Pair pair = interleaved(
                rounds, [&] { return rate_of(small); }, [&] { return served.rate(); });
            records.push_back(
                {"weights of 4 bits, the head's of 8", pair.value, "1/s", "the same model in float32", pair.baseline});
        });
    else
        std::printf("  without weights of 4 bits: scripts/models/prepare_int4.py makes %s\n", int4.c_str());
    const double alone = median(std::vector<double>{served.rate(), served.rate(), served.rate()});
    records.push_back({"weights read by the steps of one sequence", alone * weight_bytes(Served::package()) / 1e9,
                       "GB/s", "what all cores can read", bandwidth / 1e9});
    records.push_back({"p99 of a step", percentile(served.gaps, 0.99) / 1e3, "ms", "p50", median(served.gaps) / 1e3});
    return records;
}

Records beside_hugging_face() {
    Served served;
    Records records;
    for (const std::string cache : {"eager", "static"}) {
        const std::string name = "Hugging Face generate, " + cache + (cache == "static" ? " cache" : "");
        beside(name, hugging_face(cache, prompt_short, new_tokens),
               [&](Peer& peer) { records.push_back(rate_beside(served, peer, name)); });
    }
    for (const std::size_t length : {prompt_short, prompt_long}) {
        const std::string name = "Hugging Face generate, eager";
        beside(name, hugging_face("eager", length, 1), [&](Peer& peer) {
            const Pair pair = interleaved(
                rounds, [&] { return served.clients.front().generate(length, 1).all_us / 1e3; },
                [&] { return request_us(peer) / 1e3; });
            records.push_back(
                {fmt::format("first token of a prompt of {}", length), pair.value, "ms", name, pair.baseline});
        });
    }
    return records;
}

Records several_sequences() {
    const std::string chunk = fmt::format("generate: {{prefill_chunk: {}}}", prompt_long);
    Served served{test::generating("one-chunk", Served::package(), Served::threads() + chunk)};
    Records records;
    served.clients.emplace_back(served.daemon);
    const auto beside_a_prompt = [&] { return longest_gap_beside_ms(served.clients[0], served.clients[1]); };
    const std::string name = fmt::format("longest gap between tokens, beside a prompt of {}", prompt_long);
    const Pair alone = interleaved(rounds, beside_a_prompt, [&] {
        return longest_gap_ms(served.clients.front().generate(prompt_short, new_tokens));
    });
    records.push_back({name, alone.value, "ms", "alone", alone.baseline});
    with_model(served.daemon, "one-chunk", [&](Client& running) {
        Client other{served.daemon, "one-chunk"};
        const Pair pair = interleaved(rounds, beside_a_prompt, [&] { return longest_gap_beside_ms(running, other); });
        records.push_back({name, pair.value, "ms", "the prompt in one chunk", pair.baseline});
    });
    for (const std::size_t count : {2, 4}) {
        while (served.clients.size() < count) served.clients.emplace_back(served.daemon);
        const Pair pair = interleaved(
            rounds, [&] { return together(served.clients); }, [&] { return served.rate(); });
        records.push_back({fmt::format("{} sequences together, all tokens", count), pair.value, "1/s", "one sequence",
                           pair.baseline});
    }
    return records;
}

Records where_prepared(Records (*measure)()) {
    if (std::filesystem::exists(Served::package() / "manifest.json")) return measure();
    std::printf("  left out: %s is not there; scripts/models/prepare.py makes it\n", Served::package().c_str());
    return {};
}

const Bench generation_bench{"generation", "SmolLM2-135M on the CPU; more tokens a second, and fewer ms, are better",
                             [] { return where_prepared(one_sequence); }};
const Bench hugging_face_bench{"generation-hf", "the same beside Hugging Face's generate",
                               [] { return where_prepared(beside_hugging_face); }};
const Bench together_bench{"generation-together", "the same with several sequences at once",
                           [] { return where_prepared(several_sequences); }};

}  // namespace
}  // namespace bulkhead::bench::generation_bench

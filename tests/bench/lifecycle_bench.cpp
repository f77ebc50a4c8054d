// What a load and an unload cost, beside the same model in a bare LibTorch program; and what a
// swap adds to both.

#include "tests/bench/peers/peer.h"
#include "tests/bench/record.h"
#include "tests/support/daemon/daemon.h"
#include "tests/support/daemon/fleets.h"

namespace bulkhead::bench::lifecycle_bench {
namespace {

/// Until a process waits for a model, and has said hello.
void await_blank(const test::Daemon& daemon) {
    const auto deadline = Clock::now() + std::chrono::seconds{60};
    while (daemon.call("daemon.info").value().at("blanks").at("ready") != boost::json::value(1) &&
           Clock::now() < deadline) {
    }
}

Records load() {
    Records records;
    struct Case {
        const char* name;
        std::string yaml;
        std::string runtime;
        std::string file;
    };
    const std::vector<Case> cases{
        {"silero-vad", test::silero_vad(), "torchscript", test::model_file("silero_vad.jit")},
        {"minilm", test::minilm(), "aoti", test::model_file("minilm.pt2")},
    };
    for (const Case& each : cases) {
        test::Daemon daemon{test::fleet({each.yaml})};
        std::vector<double> unloads;
        const auto load_once = [&] {
            const double us = microseconds([&] { (void)daemon.load(each.name).value(); });
            unloads.push_back(microseconds([&] { (void)daemon.unload(each.name).value(); }));
            return us / 1000;
        };
        const auto program = [&each](const char* mode) {
            return std::vector<std::string>{test::program("bare_libtorch"), mode, each.runtime, each.file};
        };
        std::vector<double> kills;
        const auto bare = [&] {
            Peer loaded{program("hold")};
            if (loaded.await_ready().empty()) kills.push_back(microseconds([&] { loaded.kill(); }) / 1000);
            return microseconds([&] { (void)test::run(program("load")); }) / 1000;
        };
        load_once();  // fills the package cache and the page cache
        (void)bare();
        unloads.clear();
        kills.clear();
        const Pair pair = interleaved(7, load_once, bare);
        records.push_back({std::string{each.name} + ": load to ready", pair.value, "ms",
                           "bare LibTorch process: start, load, one inference", pair.baseline});
        test::Daemon ahead{test::fleet({each.yaml}) + "blanks: 1\n"};
        const auto load_by_blank = [&] {
            await_blank(ahead);
            const double us = microseconds([&] { (void)ahead.load(each.name).value(); });
            (void)ahead.unload(each.name).value();
            return us / 1000;
        };
        const Pair by_blank = interleaved(7, load_by_blank, bare);
        records.push_back({std::string{each.name} + ": load to ready by a blank", by_blank.value, "ms",
                           "bare LibTorch process: start, load, one inference", by_blank.baseline});
        records.push_back({std::string{each.name} + ": unload, receipt included", median(unloads) / 1000, "ms",
                           "SIGKILL and waitpid of a bare LibTorch process with the same model", median(kills)});
    }
    return records;
}

/// Two models of which one fits: loading one unloads the other. What the daemon adds to the two is
/// its decision, and the way from the receipt to the grant. No model is protected after its load.
Records swap() {
    const auto one = [](const char* name) {
        return test::minimal_model(name, "MINIMAL_BALLAST_BYTES: \"104857600\"", "memory: 110MiB\nmin_resident: 1ms\n");
    };
    const auto time_load = [](const test::Daemon& daemon, const char* model) {
        return microseconds([&] { (void)daemon.load(model).value(); }) / 1000;
    };
    test::Daemon swapping{test::fleet({one("a"), one("b")}) + "limits: {cpu: {share: 165MiB}}\n", test::minimal()};
    test::Daemon alone{test::fleet({one("a")}) + "limits: {cpu: {share: 165MiB}}\n", test::minimal()};
    time_load(swapping, "a");
    const char* next = "b";
    const Pair pair = interleaved(
        41,
        [&] {
            const double ms = time_load(swapping, next);
            next = next[0] == 'a' ? "b" : "a";
            return ms;
        },
        [&] {
            const double load = time_load(alone, "a");
            return load + microseconds([&] { (void)alone.unload("a").value(); }) / 1000;
        });
    return {{"swap of two minimal models: the other's unload, then the load", pair.value, "ms",
             "the unload and the load of one, each asked for", pair.baseline},
            {"swap less unload and load", pair.value - pair.baseline, "ms", "the goal", 5}};
}

const Bench swap_bench{"swap", "a load that needs another model's place, beside its unload and its load", swap};
const Bench load_bench{"load", "load to ready, and unload to receipt", load};

}  // namespace
}  // namespace bulkhead::bench::lifecycle_bench
